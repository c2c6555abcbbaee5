"""Released chat templates, which TRL has copies of, on tiny models."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from megavlm.config.data import Data
from megavlm.data.processor import Processor
from megavlm.families import family_of

# Template -> family whose tiny model it is tried on.
TEMPLATES = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_5_think": "qwen3_5",
    "qwen3_5_nothink": "qwen3_5",
    "qwen3_6": "qwen3_5",
    "qwen3_8": "qwen3_5",
}


# Of a text model, as far as turns and tools go.
TEXT_TEMPLATES = {"glm4moe": "glm4v_moe"}


def template_of(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text()


def with_template(
    name: str, tiny: Path, folder: Path, data: Data, *, special: tuple[str, ...] = (), **keys: Any
) -> Processor:
    """Return the processor of a copy of a tiny model with a released template, and the tokens that
    it writes. special: Further special tokens. keys: Changes of `data`.
    """
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(template_of(name))
    _add_tokens(folder / "tokenizer.json", special)
    return Processor(folder, replace(data, **keys), family_of(folder))


def _add_tokens(path: Path, special: tuple[str, ...]) -> None:
    """Add tokens as Qwen3's tokenizers have them, in rows that pad the embedding table."""
    values = json.loads(path.read_text())
    known = {token["content"]: token["id"] for token in values["added_tokens"]}
    first = max([*known.values(), *values["model"]["vocab"].values()]) + 1
    plain = dict.fromkeys(values["added_tokens"][0], False)
    texts = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    values["added_tokens"] += [
        {**plain, "id": first + i, "content": name, "special": name in special}
        for i, name in enumerate((*texts, *special))
    ]
    path.write_text(json.dumps(values))
