"""`transformers serve`, with a draft for the models it loads.

The server is transformers' own: same endpoints, same arguments. What is added: a model that it loads is enabled with
the draft (without one, the flag in the checkpoint's generation_config.json holds), requests may say False, True or a
draft length, and ``GET /specdec/report`` answers with what the last request on each model did.

How the server is hooked is known to `host.serving`.
"""

__all__ = ["REPORT_PATH", "serve"]

import logging
from typing import Any

from hf_specdec.config import normalise
from hf_specdec.host.serving import ServedModels, hooked, transformers_serve
from hf_specdec.integration import enable, register, report

logger = logging.getLogger("hf_specdec")

REPORT_PATH = "/specdec/report"
CONTINUOUS = "--continuous_batching has a decoding loop of its own and bypasses hf_specdec: nothing is speculated on"


def serve(arguments: list[str], draft: Any = None, program: str = "specdec serve", **config: Any) -> None:
    """Run the server until it is stopped.

    Args:
        arguments: those of `transformers serve`.
        draft: a Hub id, a folder or a loaded model that drafts for every model served; None leaves it to the flag in
            each checkpoint.
        program: name in usage messages.
        **config: keys of `SpeculativeConfig`, for every model served.

    Raises:
        ImportError: the serving libraries are not installed.
        ValueError, TypeError: a wrong key, or a draft that does not fit the model that the server is pinned to. A model
            loaded for a request that the draft does not fit is served plainly, with a warning.
        RuntimeError: a transformers whose server is not known.
    """
    normalise(config)
    is_continuous = any(argument in ("--continuous-batching", "--continuous_batching") for argument in arguments)
    if is_continuous:
        logger.warning("%s.%s", CONTINUOUS, "" if draft is None else " The draft is not loaded.")
    enables = not is_continuous and (draft is not None or bool(config))

    def on_load(model: Any, is_pinned: bool) -> None:
        if enables:
            _enable(model, draft, config, is_pinned)

    # With a draft given here, none that a checkpoint names is wanted.
    with register(config_drafts=draft is None), hooked(on_load, _reports, REPORT_PATH):
        transformers_serve(arguments, program)


def _enable(model: Any, draft: Any, config: dict[str, Any], is_pinned: bool) -> None:
    name = getattr(model, "name_or_path", "") or type(model).__name__
    try:
        enable(model, draft, **config)
    except (ImportError, OSError, TypeError, ValueError) as error:
        if is_pinned:
            raise
        logger.warning("%s is served plainly: %s", name, error)
    else:
        logger.info("%s is served with speculative_config=%s.", name, model.generation_config.speculative_config)


def _reports(models: ServedModels) -> dict[str, Any]:
    """The last finished call of every model in memory, as JSON data; null before the first."""
    last = {name: report(model) for name, model in models.items()}
    answer: dict[str, Any] = {"models": {name: None if r is None else r.to_dict() for name, r in last.items()}}
    return {**answer, "note": CONTINUOUS} if models.is_continuous else answer
