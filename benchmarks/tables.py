"""The tables that the documents show of the ledger, as Markdown.

Numbers are pooled per kind of text; a row over all kinds stands beside them, never alone.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_specdec.benchmark.experiment import is_greedy
from hf_specdec.benchmark.figures import digest_in, results_digest
from hf_specdec.benchmark.ledger import Ledger, read_results
from hf_specdec.benchmark.summary import (
    auto_arms,
    best_arm,
    best_fixed_arm,
    drafting,
    drift,
    identical,
    of_arm,
    peak_bytes,
    speed,
    speedup,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
NOT_YET = "*Not measured yet: `specdec benchmark benchmarks/experiments/draft_model/smollm2.toml` begins the ledger.*"

__all__ = ["all_arms", "groups", "markdown", "more_figures", "overview", "pairs", "plot", "setting", "stale_figures"]

Records = list[dict[str, Any]]
AUTO = "ours-auto"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A Markdown table; the columns named in `right` are set flush right."""
    rule = ["---:" if heading in right else "---" for heading in headings]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rule, *escaped])


def plot(results: Path = RESULTS, figures: Path = FIGURES) -> str:
    """The figures, one per device."""
    shown = []
    for device in read_results(results):
        path = figures / f"{device}.svg"
        if path.is_file():
            caption = f"Speed relative to plain decoding, and acceptance by position, on {device}"
            shown.append(f"![{caption}]({path.relative_to(figures.parents[1]).as_posix()})")
    return "\n\n".join(shown)


def more_figures(results: Path = RESULTS, figures: Path = FIGURES) -> str:
    """The figures that the README leaves to docs/benchmarks.md."""
    captions = {
        "steps": "Predicted against measured speed, and where the time of a token goes",
        "sweeps": "Speed and acceptance along temperatures and batch sizes",
    }
    shown = [
        f"![{caption}, on {device}]({figures.name}/{device}-{name}.svg)"
        for device in read_results(results)
        for name, caption in captions.items()
        if (figures / f"{device}-{name}.svg").is_file()
    ]
    return "\n\n".join(shown)


def stale_figures(results: Path = RESULTS, figures: Path = FIGURES) -> list[str]:
    """What has to be said of figures that were not drawn from these results."""
    return [
        f"the figure of {device} is stale: run specdec report"
        for device, ledgers in read_results(results).items()
        if digest_in(figures / f"{device}.svg") != results_digest(ledgers)
    ]


def overview(results: Path = RESULTS) -> str:
    """The README's table: per pair, mode and kind plain, transformers' assisted at its best, and ours: K chosen in the
    call, and the K that was best afterwards."""
    parts = []
    for device, ledgers in read_results(results).items():
        rows = [row for name, ledger in ledgers.items() for row in _overview_rows(name, ledger)]
        headings = ("pair", "dtype, batch", "decoding", "text (prompts)", "plain tokens/s")
        headings += ("transformers' assisted", "hf_specdec, auto", "hf_specdec, best fixed K")
        headings += ("tokens/s", "tokens per pass")
        parts.append(f"**{device}**\n\n" + markdown(headings, rows, right=(headings[4], *headings[8:])))
    return "\n\n".join([*parts, LEGEND]) if parts else NOT_YET


LEGEND = (
    "Speeds are relative to plain decoding on the same prompts in the same run, with 95 % bootstrap intervals over "
    "prompts. *auto* is `enable(target, draft)` as it comes, in brackets the tokens that it drafted per step; the "
    "settings in the brackets beside it were the fastest on that row, chosen afterwards. The last two columns are the "
    "bold one's. Whole calls are timed, prefill included. "
    "“all” pools the kinds above it. Every arm, acceptance by position, draft cost and memory: "
    "[docs/benchmarks.md](docs/benchmarks.md)."
)


def _overview_rows(name: str, ledger: Ledger) -> Iterable[tuple[str, ...]]:
    for batch, mode, kind, records in groups(ledger):
        fixed, assisted = best_fixed_arm(records), best_arm(records, "assisted")
        auto = AUTO if AUTO in auto_arms(records) else None
        ours = auto or fixed
        drafts = drafting(records, ours) if ours else None
        yield (
            Path(name).name,
            f"{ledger.data['experiment']['dtype']}, {batch}",
            mode,
            f"{kind} ({_num_prompts(records)})",
            f"{speed(of_arm(records, 'plain')):.1f}",
            f"{speedup(records, assisted)} [{setting(assisted)}]" if assisted else "—",
            f"**{speedup(records, auto)}** [{_chosen_length(records, auto)}]" if auto else "—",
            _emphasised(f"{speedup(records, fixed)}", not auto) + f" [{setting(fixed)}]" if fixed else "—",
            f"{speed(of_arm(records, ours)):.1f}" if ours else "—",
            f"{drafts.mean_acceptance_length:.2f}" if drafts else "—",
        )


def groups(ledger: Ledger) -> Iterable[tuple[int, str, str, Records]]:
    """(batch, mode, kind, records) in the ledger's order; after the kinds of a mode, all of them together."""
    by_mode: dict[tuple[int, str], Records] = {}
    for record in ledger.records():
        by_mode.setdefault((record["batch"], record["mode"]), []).append(record)
    for (batch, mode), records in by_mode.items():
        kinds = dict.fromkeys(record["kind"] for record in records)
        for kind in kinds:
            yield batch, mode, kind, [record for record in records if record["kind"] == kind]
        if len(kinds) > 1:
            yield batch, mode, "all", records


def _num_prompts(records: Records) -> int:
    return len({(record["kind"], record["prompt"]) for record in records})


def setting(arm: str) -> str:
    """An arm's settings in few words: K=3, nf4 K=3, ngram K=4, default."""
    family, _, rest = arm.partition("-")
    draft, _, length = rest.rpartition("-")
    what = " ".join(part for part in (family if family == "ngram" else "", draft) if part)
    return f"{what} K={length}".strip() if length.isdigit() else rest


def _emphasised(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _chosen_length(records: Records, arm: str) -> str:
    """What an arm that chooses K drafted per step, on average."""
    drafts = drafting(records, arm)
    return "K chosen" if drafts is None or drafts.mean_draft_length is None else f"K={drafts.mean_draft_length:.1f}"


def pairs(results: Path = RESULTS) -> str:
    """What the README says of the demo's pairs: the most that each can gain, from its measured acceptance and cost."""
    lines = []
    for device, ledgers in read_results(results).items():
        for name, ledger in ledgers.items():
            greedy = [r for r in ledger.records() if (r["batch"], r["mode"]) == (1, "greedy")]
            models = [r for r in greedy if r["arm"].startswith("ours-")]  # look-ups cost nothing and bound nothing
            arm = best_fixed_arm(models)
            drafts = drafting(greedy, arm) if arm else None
            if arm is None or drafts is None or drafts.cost_coefficient is None:
                continue
            alpha, cost = drafts.acceptance_rate, drafts.cost_coefficient
            lines.append(
                f"- {Path(name).name} ({device}, greedy): {alpha:.0%} of the draft tokens that are reached are kept "
                f"and a draft pass costs {cost:.2f} of a target pass, which bounds the gain at "
                f"{_bound(alpha, cost):.2f}×; measured {speedup(greedy, arm)}."
            )
    return "\n".join(lines) if lines else NOT_YET


def _bound(alpha: float, cost: float) -> float:
    """max over K of (1 − α^(K+1)) / ((1 − α)(1 + cK)): expected tokens ÷ cost of a step, nothing else costing."""
    return max(sum(alpha**i for i in range(length + 1)) / (1 + cost * length) for length in range(33))


def all_arms(results: Path = RESULTS) -> str:
    """Every cell and arm, with what a reader needs to judge them."""
    parts = []
    for device, ledgers in read_results(results).items():
        for name, ledger in ledgers.items():
            parts.append(f"### {name} on {device}\n\n{_circumstances(ledger)}")
            for batch, mode, kind, records in groups(ledger):
                title = f"#### {mode}, {kind}, batch {batch} ({_num_prompts(records)} prompts)"
                steady = f"Plain decoding after the others ran at {drift(records):.2f}× its speed before them."
                parts += [title, _arms_table(mode, records), steady]
    return "\n\n".join(parts) if parts else NOT_YET


def _arms_table(mode: str, records: Records) -> str:
    headings = ("arm", "tokens/s", "÷ plain", "K", "tokens per pass", "acceptance by position", "c")
    headings += ("draft / verify / prefill / other", "peak memory", "equal to plain")
    rows = []
    for arm in sorted({record["arm"] for record in records}):
        drafts = drafting(records, arm)
        cost = None if drafts is None else drafts.cost_coefficient
        equal = "{} of {}".format(*identical(records, arm)) if is_greedy(mode) else ""
        rates = [] if drafts is None else ["–" if rate is None else f"{rate:.2f}" for rate in drafts.by_position]
        row = (
            arm if drafts is None or not drafts.reasons else f"{arm} (plainly: {'; '.join(drafts.reasons)})",
            f"{speed(of_arm(records, arm)):.2f}",
            str(speedup(records, arm)),
            "" if drafts is None or drafts.mean_draft_length is None else f"{drafts.mean_draft_length:.1f}",
            "" if drafts is None else f"{drafts.mean_acceptance_length:.2f}",
            " ".join(rates),
            "" if cost is None else f"{cost:.2f}",
            "" if drafts is None else " / ".join(f"{share:.1%}" for share in drafts.shares.values()),
            f"{peak_bytes(records, arm) / 2**30:.2f} GiB",
            equal,
        )
        rows.append(row)
    return markdown(headings, rows, right=("tokens/s", "÷ plain", "K", "tokens per pass", "c", "peak memory"))


def _circumstances(ledger: Ledger) -> str:
    """What was asked, and where and when it was measured."""
    asked, cells = ledger.data["experiment"], ledger.data["cells"].values()
    environments = [cell["environment"] for cell in cells]
    commits = sorted(
        {(e["commit"] or "unknown")[:10] + ("+" if e["has_uncommitted_changes"] else "") for e in environments}
    )
    dates = sorted({environment["date"][:10] for environment in environments})
    quantized = f" (target {asked['target_quantization']})" if asked.get("target_quantization") else ""
    packages = ", ".join(f"{name} {version}" for name, version in environments[-1]["packages"].items())
    return (
        f"{asked['target']} drafted by {asked['draft']}, {asked['dtype']}{quantized}, "
        f"{asked['max_new_tokens']} new tokens, seeds {', '.join(map(str, asked['seeds']))}; "
        f"{environments[-1]['threads']} threads; {packages}; commit "
        f"{', '.join(commits)} (+: with uncommitted changes); {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )
