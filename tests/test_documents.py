"""Every document that code, scripts or documents cite exists, and so does every section of docs/method.md they name."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("rpg_jax", "configs", "docs", "launch", "tests", "third_party", "studies")
CITING = (".py", ".sh", ".md")
WRITTEN = {"report.md", "study.md", "tables.md"}  # what commands write, not what somebody is to read here
DOCUMENT = re.compile(r"[\w./:-]*\w\.md\b(?!\.\w)")  # page.md.jinja is a template
SECTIONS = re.compile(r"docs/method\.md (\d[\d.]*(?:,? (?:and |to )?\d[\d.]*)*)")
SECTION = re.compile(r"\d+(?:\.\d+)?")
HEADINGS = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", (ROOT / "docs/method.md").read_text(), re.MULTILINE))


def citing_files() -> list[str]:
    """Paths, from the root of the repository, of the files that may cite a document."""
    files = [*ROOT.glob("*"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    return sorted(file.relative_to(ROOT).as_posix() for file in files if file.suffix in CITING)


def faults(path: str, text: str) -> list[str]:
    """What a file cites that is not there: documents by path from the root or from the file's folder, and sections."""
    documents = {name for name in DOCUMENT.findall(text) if "://" not in name} - WRITTEN
    places = (ROOT, (ROOT / path).parent)
    missing = [name for name in documents if not any((place / name).is_file() for place in places)]
    sections = {number for listed in SECTIONS.findall(text) for number in SECTION.findall(listed)}
    return sorted(missing) + [f"docs/method.md {number}" for number in sorted(sections - HEADINGS)]


@pytest.mark.parametrize("path", citing_files())
def test_what_is_cited_exists(path):
    missing = faults(path, (ROOT / path).read_text())
    assert not missing, f"{path} cites {', '.join(missing)}"


def test_every_folder_is_searched():
    files = citing_files()
    assert {"README.md", "docs/method.md", "launch/test.sh", "rpg_jax/objectives/surrogates.py"} <= set(files)


# Citations are put together here, for this file is searched as well.
@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("rpg_jax/a.py", "# see docs/absent" + ".md", "docs/absent" + ".md"),
        ("rpg_jax/a.py", "the table (method" + ".md 3)", "method" + ".md"),
        ("docs/method.md", "[a page](absent" + ".md#part)", "absent" + ".md"),
        ("rpg_jax/a.py", "docs/method.md " + "99", "docs/method.md " + "99"),
        ("rpg_jax/a.py", "docs/method.md " + "3 and 99.1.", "docs/method.md " + "99.1"),
    ],
)
def test_a_made_up_citation_is_found(path, text, fault):
    assert faults(path, text) == [fault]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("rpg_jax/a.py", "docs/method.md 3, 4.1 and 5.3."),
        ("docs/architecture.md", "[the method](method" + ".md)"),
        ("launch/a.sh", "# https://example.org/absent.md"),
        ("rpg_jax/a.py", 'path.with_suffix(".md"), f"{name}.md"'),
    ],
)
def test_what_exists_may_be_cited(path, text):
    assert not faults(path, text)
