"""Where the name of a draft may point.

A name given in code is trusted as far as ``from_pretrained`` trusts it: a folder or a Hub id, safetensors only. A name
*found in data* (generation_config.json, a request, a pipeline's dictionary) was perhaps written by somebody else: it
may only mean a folder inside the target's own checkpoint, links followed, or a Hub id "org/name".

Touches nothing but folder listings; `loading` reads the files.
"""

__all__ = ["IN_CODE", "counts_in_code", "counts_in_data", "source_in_code", "source_in_data"]

import re
from pathlib import Path

from transformers import PreTrainedModel

HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
IN_CODE = "To use it, pass the draft in code: hf_specdec.enable(target, draft)."


def source_in_code(model: str) -> str:
    """The folder or Hub id that a name in the user's code means."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        _check_folder(folder, model)
        return str(folder.resolve())
    if folder.is_file():
        raise ValueError(f"The draft {model!r} is a file. Give the folder that holds it, with its config.json.")
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or "\\" in model:
        raise ValueError(
            f"The draft's folder {model!r} does not exist. Give an existing folder or a Hub id 'org/name'."
        )
    return model


def source_in_data(model: str, target: PreTrainedModel) -> str:
    """The folder inside the target's checkpoint, or the Hub id, that a name found in data means."""
    path = Path(model)
    if path.is_absolute() or ".." in path.parts or "\\" in model or model.startswith("~"):
        raise ValueError(
            f"The draft {model!r} is named in data and points outside the target's checkpoint folder; only a folder "
            f"inside it or a Hub id 'org/name' is loaded from there. {IN_CODE}"
        )
    home = _home(target)
    if home is not None and (home / path).exists():
        inside = _enclosure(home)
        folder = (home / path).resolve()
        for place in [folder, *folder.rglob("*")]:
            if not place.resolve().is_relative_to(inside):
                raise ValueError(
                    f"The draft {model!r} is named in data, and {str(path)!r} in the target's checkpoint folder leads "
                    f"outside of it by a symbolic link. {IN_CODE}"
                )
        if not folder.is_dir():
            raise ValueError(f"The draft {model!r} is a file. Name the folder that holds it, with its config.json.")
        _check_folder(folder, model)
        return str(folder)
    if not HUB_ID.fullmatch(model):
        raise ValueError(
            f"The draft {model!r} is named in data, and the target's checkpoint folder holds no such folder; nor is it "
            f"a Hub id 'org/name'. {IN_CODE}"
        )
    if path.exists():  # from_pretrained would take the folder in the working directory for the Hub's model
        raise ValueError(
            f"The draft {model!r} is named in data, and a folder of that name in the working directory hides the "
            f"Hub's. {IN_CODE}"
        )
    return model


def counts_in_code(path: str) -> str:
    """The file of token counts that a path in the user's code means."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"draft_vocab names the token counts {path!r}, and there is no such file. Make it with "
            "hf_specdec.count_tokens(tokenizer, texts, path), or pass the number of ids."
        )
    return str(file.resolve())


def counts_in_data(name: str, target: PreTrainedModel) -> str:
    """The file of token counts inside the target's checkpoint folder that a name found in data means."""
    path, home = Path(name), _home(target)
    is_relative = not (path.is_absolute() or ".." in path.parts or "\\" in name or name.startswith("~"))
    if is_relative and home is not None and (home / path).is_file():
        file = (home / path).resolve()
        if file.is_relative_to(_enclosure(home)):
            return str(file)
    raise ValueError(
        f"draft_vocab names the token counts {name!r} in data, where only a file inside the target's checkpoint folder "
        "is read. To use another one, pass it in code: hf_specdec.enable(target, draft, draft_vocab=…)."
    )


def _home(target: PreTrainedModel) -> Path | None:
    """The folder that the target was loaded from, if it is one."""
    name = getattr(target, "name_or_path", "") or getattr(target.config, "_name_or_path", "")
    return Path(name) if name and "\0" not in name and Path(name).is_dir() else None


def _enclosure(home: Path) -> Path:
    """The folder that a checkpoint's files have to stay in: its own, or the repository's in the Hub cache's layout."""
    home = home.resolve()
    is_snapshot = home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--")
    return home.parent.parent if is_snapshot else home  # a snapshot's files are links into the repository's blobs


def _check_folder(folder: Path, model: str) -> None:
    if (folder / "adapter_config.json").is_file():
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"The draft's folder {model!r} holds no config.json. Give a folder written by save_pretrained()."
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"The draft's folder {model!r} holds no *.safetensors file; other formats may run code and are not loaded. "
            "Save the model again with save_pretrained()."
        )
