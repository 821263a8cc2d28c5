"""What mkdocs does not do by itself for this site: files outside docs/, formulas without JavaScript, the notebook.

A page of the site is a Markdown file of the repository. Its links stay those that work on a disk and on a code host: a
link to a file outside docs/, or to source code, leads to a page that this module makes of that file.
"""

import json
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # other files that are pages, by their name on the site
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "third_party/README.md": "third_party/README",
    "docs/surrogates.ipynb": "surrogates",
}
ASSETS = {".png", ".svg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}  # others are plain text
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
BLACKBOARD = re.compile(r"\\mathbb ?\{?([ER])\}?")  # browsers draw no mathvariant
FUNCTION = re.compile(r"<mi>(log|exp|min|max)</mi>")  # an identifier would touch its neighbours
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

FROM: dict[str, str] = {}  # page of the site -> file of the repository


def place(path: str) -> str:
    """Where a file of the repository (path from its root) is on the site: a page, or an image."""
    if path in PAGES:
        return f"{PAGES[path]}.md"
    inside = path.removeprefix("docs/")
    if Path(path).suffix in {".md", *ASSETS}:
        return inside
    return f"source/{path}.md"


def targets(path: str, text: str) -> list[str]:
    """Paths, from the root, of the files that a Markdown file of the repository links to outside its code blocks."""
    prose = "".join(FENCED.split(text)[::2])
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])) for link in LINK.findall(prose)]


def relinked(path: str, text: str) -> str:
    """The text of a Markdown file with its links as they are from that file's page."""

    def link(match: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        here = posixpath.dirname(place(path)) or "."
        return f"{match[1]}{posixpath.relpath(place(target), here)}{match[3] or ''}{match[4]}"

    parts = FENCED.split(text)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def notebook(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            text = output.get("text") or output.get("data", {}).get("text/plain", [])
            image = output.get("data", {}).get("image/png")
            if image:
                parts.append(f"![figure](data:image/png;base64,{''.join(image.split())})")
            elif text:
                parts.append("```text\n" + "".join(text).rstrip() + "\n```")
    return "\n\n".join(parts)


def content(path: str) -> str:
    """The Markdown of a page: that of the file, or the file itself as a listing."""
    file = ROOT / path
    if not file.is_file():
        raise PluginError(f"a page links to {path}, which is not a file of the repository")
    if file.suffix == ".ipynb":
        return notebook(file)
    text = file.read_text()
    if file.suffix == ".md":
        return text
    return f'# {path}\n\n````{LANGUAGES.get(file.suffix, "text")} linenums="1"\n{text}````\n'


def on_files(files, config):
    """Adds the files outside docs/ and the source files that pages link to, and what those link to."""
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = content(path)
        if not files.get_file_from_path(place(path)):
            files.append(File.generated(config, place(path), content=text))
        FROM[place(path)] = path
        linked = [t for t in targets(path, text) if t not in seen]
        seen.update(linked)
        for target in linked:
            if Path(target).suffix not in ASSETS:
                waiting.append(target)
            elif not target.startswith("docs/"):
                files.append(File.generated(config, place(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown, page, config, files):
    return relinked(FROM[page.file.src_uri], markdown)


def on_page_content(html, page, config, files):
    """Formulas as MathML, which browsers show without a script."""

    def formula(match: re.Match) -> str:
        text = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()
        text = BLACKBOARD.sub(lambda letter: {"E": "\\text{𝔼}", "R": "\\text{ℝ}"}[letter[1]], text)
        mathml = convert(text, display="block" if match[1] == "div" else "inline")
        return FUNCTION.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', mathml)

    return FORMULA.sub(formula, html)
