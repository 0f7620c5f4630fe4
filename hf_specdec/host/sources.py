"""Where the name of a draft may point.

A name given in code is trusted as far as ``from_pretrained`` trusts it: a folder or a Hub id, safetensors only. A name
*found in data* (generation_config.json, a request, a pipeline's dictionary) was perhaps written by somebody else: it
may only mean a folder inside the target's own checkpoint, links followed, or a Hub id "org/name".

Touches nothing but folder listings; `loading` reads the files.
"""

__all__ = ["IN_CODE", "source_in_code", "source_in_data"]

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
    home = Path(getattr(target, "name_or_path", "") or getattr(target.config, "_name_or_path", "") or "\0")
    if "\0" not in str(home) and home.is_dir() and (home / path).exists():
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
