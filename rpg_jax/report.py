"""Holds runs against each other: one HTML page that needs nothing else, and the same in Markdown.

    python -m rpg_jax.report runs/objectives [MORE_FOLDERS...] [--out=report.html]

Each folder is that of a run, or of a sweep or anything else with runs beneath it. Runs that differ in their seed
alone are one variant. The page has training curves as interquartile means with 95 % stratified bootstrap bands, a
table of last and best scores with the best (bold) and second best (underlined), the probability that one variant
improves on another, what is significant in words, what runs cost, how their configs differ and, for experiments of
the paper, its scores. Beside --out (report.html in the first folder if unset) go the Markdown with the same name and
its figures. Unfinished runs and lines that a crash cut short are shown as such.
"""

import pathlib

from absl import flags

from rpg_jax.lab.reporting import compose, page, published, runs
from rpg_jax.run import cli
from rpg_jax.storage.logs import write_text_atomic

_OUT = flags.DEFINE_string("out", None, "The page, NAME.html; report.html in the first folder if unset.")


def main(options):
    folders = options.arguments
    with cli.door():
        if not folders:
            raise ValueError("name folders of runs, such as runs/objectives; see --help")
        out = pathlib.Path(_OUT.value or pathlib.Path(folders[0]) / "report.html")
        if out.suffix != ".html":
            raise ValueError(f"--out={out}: expected a name that ends in .html, such as report.html")
        read = [runs.read(path) for path in runs.find(folders)]
        title = f"Report of {', '.join(map(str, map(pathlib.Path, folders)))}"
        blocks = compose.document(title, read, published.experiments())
        out.parent.mkdir(parents=True, exist_ok=True)
        for block in blocks:
            if isinstance(block, page.Figure):
                write_text_atomic(out.with_name(f"{out.stem}-{block.name}.svg"), block.svg + "\n")
        write_text_atomic(out.with_suffix(".md"), page.to_markdown(blocks, out.stem))
        write_text_atomic(out, page.to_html(title, blocks))
    print(f"runs: {len(read)}; see {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    cli.run(main, arguments=True)
