"""What `transformers serve` lets in: its loading of models, its requests, its web application.

A request's body may carry a whole GenerationConfig. The flag in it may be False, True or a draft length K, nothing
else: a request must not be able to name a model. It may stand in that config or, for short, at the top of the body.
Checked twice, before a model is loaded for the request and where the body becomes a config.

Read in transformers 5.17 and 5.24 (cli/serve.py, cli/serving/). Knows nothing of drafts; `hf_specdec.serve` does.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import transformers

__all__ = ["MAX_REQUEST_DRAFT_LENGTH", "RequestError", "ServedModels", "hooked", "request_flag", "transformers_serve"]

FLAG = "speculative_config"
MAX_REQUEST_DRAFT_LENGTH = 32
"""Most tokens per step that a request may ask for: each costs the server memory and time."""


def request_flag(value: Any) -> bool | int | None:
    """The flag of a request, if it is one: None (not given), False, True, or a draft length.

    Raises:
        ValueError: anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and 1 <= value <= MAX_REQUEST_DRAFT_LENGTH:
        return value
    got = f"an object with {len(value)} keys" if isinstance(value, Mapping) else repr(value)[:60]
    raise ValueError(
        f"In a request speculative_config must be false, true or an integer from 1 to {MAX_REQUEST_DRAFT_LENGTH}, the "
        f"tokens to draft in every step; got {got}. The draft is chosen where the server is started: "
        "specdec serve --draft …"
    )


class RequestError(ValueError):
    """A request that is answered with status 400 and this text."""


class ServedModels:
    """The models that a server holds, by the names that requests use.

    Args:
        manager: the server's ModelManager.
        is_continuous: whether the server was started with ``--continuous_batching``.
    """

    def __init__(self, manager: Any, is_continuous: bool) -> None:
        self._manager, self.is_continuous = manager, is_continuous

    def items(self) -> list[tuple[str, Any]]:
        """(name, model) of every model in memory."""
        timed = [(name, entry.model) for name, entry in list(self._manager.loaded_models.items())]
        return [(name, model) for name, model in timed if model is not None]


@contextlib.contextmanager
def hooked(on_load: Callable[[Any, bool], None], report: Callable[[ServedModels], Any], path: str) -> Iterator[None]:
    """While open, servers that are started call back, and check the flag of their requests.

    Args:
        on_load: called with every model that is loaded, and whether the server is pinned to it; may raise.
        report: answers ``GET path`` with JSON data.
        path: of the report.

    Raises:
        ImportError: the serving libraries are not installed.
        RuntimeError: this transformers does not look as the hooks need it; no server then, because requests would go
            unchecked.
    """
    manager, handler, server = _parts()
    originals = [
        (manager, "_load_model", manager._load_model),
        (handler, "_validate_request", handler._validate_request),
        (handler, "_build_generation_config", handler._build_generation_config),
        (server, "build_server", server.build_server),
    ]
    wraps = (_wrap_load(on_load), _wrap_validate, _wrap_build_config, _wrap_build_server(report, path))
    try:
        for (owner, name, original), wrap in zip(originals, wraps, strict=True):
            setattr(owner, name, functools.wraps(original)(wrap(original)))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def transformers_serve(arguments: list[str], program: str) -> None:
    """Run `transformers serve` with `arguments`, until it is stopped.

    Raises:
        SystemExit: wrong arguments, after the usage was printed, or the end of the command.
    """
    import typer
    from transformers.cli.serve import Serve

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(Serve)
    typer.main.get_command(app)(args=arguments, prog_name=program)


def _parts() -> tuple[Any, Any, Any]:
    """The classes and the module that are hooked."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("Serving needs libraries that are not installed: pip install 'hf_specdec[serve]'.")
    from transformers.cli.serving import model_manager, server, utils

    manager, handler = model_manager.ModelManager, utils.BaseHandler
    needed = {
        manager._load_model: ("model_id_and_revision",),
        handler._validate_request: ("body",),
        handler._build_generation_config: ("body", "model_generation_config", "use_cb"),
        server.build_server: ("model_manager", "generation_state"),
    }
    for function, names in needed.items():
        missing = [name for name in names if name not in inspect.signature(function).parameters]
        if missing:
            raise RuntimeError(
                f"specdec serve does not know this transformers ({transformers.__version__}): {function.__qualname__} "
                f"takes no {missing[0]}. Tested with 5.17 to 5.24."
            )
    return manager, handler, server


# --- the hooks ------------------------------------------------------------------------------------------------------


def _wrap_load(on_load: Callable[[Any, bool], None]) -> Callable[[Callable], Callable]:
    def wrap(original: Callable) -> Callable:
        def _load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            model = original(self, *args, **kwargs)
            on_load(model, self.force_model is not None)
            return model

        return _load_model

    return wrap


def _wrap_validate(original: Callable) -> Callable:
    def _validate_request(self: Any, body: dict) -> Any:
        flag = _taken_flag(body)
        result = original(self, body)
        if flag is not None:
            body[FLAG] = flag
        return result

    return _validate_request


def _wrap_build_config(original: Callable) -> Callable:
    def _build_generation_config(
        self: Any, body: dict, model_generation_config: Any, use_cb: bool = False, **kwargs: Any
    ) -> Any:
        flag = _taken_flag(body)
        config = original(self, body, model_generation_config, use_cb=use_cb, **kwargs)
        if flag is None:
            return config
        if flag is not False and use_cb:
            raise RequestError("This server runs with --continuous_batching, which does not speculate.")
        if flag is not False and not getattr(model_generation_config, FLAG, None):
            raise RequestError("This server has no draft for the model. Start it with: specdec serve --draft …")
        config.speculative_config = flag if isinstance(flag, bool) else {"num_speculative_tokens": flag}
        return config

    return _build_generation_config


def _wrap_build_server(report: Callable[[ServedModels], Any], path: str) -> Callable[[Callable], Callable]:
    def wrap(original: Callable) -> Callable:
        signature = inspect.signature(original)

        def build_server(*args: Any, **kwargs: Any) -> Any:
            app = original(*args, **kwargs)
            parts = signature.bind(*args, **kwargs).arguments
            is_continuous = bool(getattr(parts["generation_state"], "_continuous_batching", False))
            app.get(path)(functools.partial(report, ServedModels(parts["model_manager"], is_continuous)))
            app.add_exception_handler(RequestError, _answer_refused)
            return app

        return build_server

    return wrap


def _taken_flag(body: dict) -> bool | int | None:
    """The request's flag, taken out of `body`: from the top, or from the GenerationConfig in it, which is JSON text."""
    flag = _checked(body.pop(FLAG, None))
    text = body.get("generation_config")
    if text is None:
        return flag
    try:
        options = json.loads(text)
    except (TypeError, ValueError) as error:
        raise RequestError(f"generation_config must be a JSON object as text: {error}.") from error
    if not isinstance(options, dict):
        raise RequestError(f"generation_config must be a JSON object as text, got {type(options).__name__}.")
    if FLAG in options:
        inner = _checked(options.pop(FLAG))
        body["generation_config"] = json.dumps(options)
        flag = inner if flag is None else flag
    return flag


def _checked(value: Any) -> bool | int | None:
    try:
        return request_flag(value)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _answer_refused(request: Any, error: Exception) -> Any:
    from fastapi.responses import JSONResponse

    # As OpenAI writes errors: its clients show the message of this shape only.
    content = {"message": str(error), "type": "invalid_request_error", "param": FLAG, "code": None}
    return JSONResponse({"error": content}, status_code=400)
