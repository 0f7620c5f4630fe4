"""Renders what the documents take from code and results, between their markers.

    python benchmarks/render.py            # rewrite what has changed
    python benchmarks/render.py --check    # fail if anything would change, naming it

A marker pair ``<!-- NAME --> … <!-- /NAME -->`` in a document belongs to one function here, in `tables` or in `bars`.
Nothing between markers is edited by hand, and no number stands in a document that no results file holds.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # the script runs from a clone, installed or not

from benchmarks import bars, tables  # noqa: E402

__all__ = ["SECTIONS", "configuration", "file_tree", "models_tested", "processors", "replaced", "summary_of"]

#: folders whose files are not listed one by one, and what the file tree says of them
FOLDERS = {
    "benchmarks/experiments": "the questions, one TOML file per pair",
    "benchmarks/results": "the answers, one JSON file per device and question",
    "docs/design": "one page per decision",
    "docs/figures": "drawn from the results by `specdec report`",
    "tests/benchmarks": "what the loop itself costs",
    "tests/gpu": "needs a CUDA device",
    "tests/integration": "register and undo, save and load, pipelines, streamers",
    "tests/losslessness": "exact law, sampled law, and the wrong rules that must be rejected",
    "tests/parity": "greedy text equal to plain's, over the model zoo",
    "tests/properties": "hypothesis: any logits, lengths, masks",
    "tests/real": "the real small models",
    "tests/unit": "one file per module",
}
#: folders whose Python files are listed with the first sentence of their docstring
LISTED = ("hf_specdec", "benchmarks", "examples")


def configuration() -> str:
    """The keys of the flag: the dataclass's defaults with its docstring's words."""
    from hf_specdec.config import SpeculativeConfig

    meanings = _attributes(inspect.getdoc(SpeculativeConfig) or "")
    rows = []
    for field in dataclasses.fields(SpeculativeConfig):
        default = "" if field.default is None else f"`{_json(field.default)}`"
        rows.append((f"`{field.name}`", default, meanings[field.name]))
    return tables.markdown(("key", "default", "meaning"), rows)


def _json(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _attributes(docstring: str) -> dict[str, str]:
    """The entries of a Google-style ``Attributes:`` section."""
    section = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    entries: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        start = re.match(r" {4}(\w+): (.*)", line)
        if start:
            name, entries[start[1]] = start[1], start[2]
        elif line.strip():
            entries[name] += " " + line.strip()
    return entries


def models_tested() -> str:
    """The families of the tests' zoo."""
    from tests.zoo import FAMILIES

    rows = []
    for family in FAMILIES:
        reason = getattr(family, "reason", None)
        rows.append(
            (
                family.name,
                f"`{family.model_type}`",
                ", ".join(getattr(family, "implementations", ())),
                "speculates" if reason is None else f"plainly: {reason}",
                getattr(family, "notes", ""),
                "`make test-slow`" if getattr(family, "is_slow", False) else "`make test`",
            )
        )
    return tables.markdown(("family", "`model_type`", "attention", "decodes", "special", "suite"), rows)


def processors() -> str:
    """How each logits processor of transformers runs over a block."""
    from hf_specdec.host.processors import processor_table

    return tables.markdown(("logits processor", "in a block"), [(f"`{name}`", how) for name, how in processor_table()])


def file_tree() -> str:
    """One line per file: the first sentence of its docstring."""
    lines: list[str] = []
    for top in LISTED:
        lines += _tree(ROOT / top, 0)
    for folder, what in FOLDERS.items():
        if folder.split("/")[0] not in LISTED:
            lines.append(_line(f"{folder}/", what, 0))
    return "```text\n" + "\n".join(lines) + "\n```"


def _tree(folder: Path, depth: int) -> list[str]:
    lines = [_line(f"{folder.name}/", "", depth)]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name = path.relative_to(ROOT).as_posix()
        if name in FOLDERS:
            lines.append(_line(f"{path.name}/", FOLDERS[name], depth + 1))
        elif path.is_dir() and any(path.glob("*.py")):
            lines += _tree(path, depth + 1)
        elif path.suffix == ".py":
            lines.append(_line(path.name, summary_of(path), depth + 1))
    return lines


def _line(name: str, what: str, depth: int) -> str:
    return f"{'  ' * depth}{name:<{26 - 2 * depth}}{what}".rstrip()


def summary_of(path: Path) -> str:
    """First sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\"])\. (?=[A-Z`])", paragraph)[0].rstrip(".").replace("``", "").replace("`", "")


Section = tuple[str, str, Callable[[], str]]

#: (document, marker, what stands between its two ends)
SECTIONS: tuple[Section, ...] = (
    ("README.md", "results:plot", tables.plot),
    ("README.md", "results:table", tables.overview),
    ("README.md", "results:pairs", tables.pairs),
    ("README.md", "generated:config", configuration),
    ("README.md", "generated:models", models_tested),
    ("README.md", "generated:tree", file_tree),
    ("docs/benchmarks.md", "results:figures", tables.more_figures),
    ("docs/benchmarks.md", "results:bars", bars.bars),
    ("docs/benchmarks.md", "results:all", tables.all_arms),
    ("docs/processors.md", "generated:processors", processors),
)


def replaced(text: str, marker: str, content: str) -> str:
    """`text` with `content` between the ends of `marker`.

    Raises:
        ValueError: the marker is not there exactly once.
    """
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"Expected {start} … {end} exactly once.")
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    return f"{before}{start}\n{content.strip()}\n{end}{after}"


def rendered(sections: tuple[Section, ...] = SECTIONS, root: Path = ROOT) -> dict[Path, str]:
    """The documents as they should be."""
    texts: dict[Path, str] = {}
    for document, marker, render in sections:
        path = root / document
        text = texts.get(path, path.read_text(encoding="utf-8"))
        try:
            texts[path] = replaced(text, marker, render())
        except ValueError as error:
            raise ValueError(f"{document}: {error}") from error
    return texts


def main() -> int:
    """Rewrite or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    is_check = parser.parse_args().check
    problems = tables.stale_figures()
    for path, text in rendered().items():
        if path.read_text(encoding="utf-8") == text:
            continue
        if is_check:
            problems.append(f"{path.relative_to(ROOT)} has drifted: run python benchmarks/render.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"rendered {path.relative_to(ROOT)}")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return int(is_check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
