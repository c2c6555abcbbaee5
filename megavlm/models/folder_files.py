"""Check that the files of a HuggingFace folder agree with its config.json. Reads only JSON."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megavlm.families import AUTHORS, family_of, model_values

Values = Mapping[str, Any]

_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")


def check_pickles(folder: Path) -> None:
    """Raise ValueError if a folder has weights in no form but as pickles."""
    names = [path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)]
    if names and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds pickled weights ({min(names)}); loading them can run any code: "
            "if you trust them, save them as safetensors (save_pretrained in transformers)."
        )


def check_files(folder: Path) -> None:
    """Raise ValueError if a processor, the tokenizer or generation_config.json of a folder
    contradicts its config.json. A value that a file leaves out contradicts nothing.
    """
    config = _read(folder / "config.json")
    if config.get("model_type") in AUTHORS:
        return  # its files do not repeat the values of its config.json
    config = model_values(config)
    names = family_of(folder).folder_names()
    vision = config.get("vision_config", {})
    for name, values in _processors(folder):
        for ours, theirs in names.sizes.items():
            if ours in vision and theirs in values and vision[ours] != values[theirs]:
                raise ValueError(
                    f"{folder / name} has {theirs}={values[theirs]}, but config.json has "
                    f"vision_config.{ours}={vision[ours]}: copy the file from the folder that the "
                    "model came from."
                )
    vocabulary = config.get("text_config", config).get("vocab_size", config.get("vocab_size"))
    tokens = _tokens(folder)
    for key, token in names.tokens.items():
        if config.get(key) is not None and tokens.get(token, config[key]) != config[key]:
            raise ValueError(
                f"{folder / 'config.json'} has {key}={config[key]}, but {token} is token "
                f"{tokens[token]} of tokenizer.json: copy one of them from the folder that the "
                "model came from."
            )
    if vocabulary is None:
        return
    for token in names.only_in_templates:
        tokens.pop(token, None)
    if tokens and max(tokens.values()) >= vocabulary:
        token = max(tokens, key=tokens.__getitem__)
        raise ValueError(
            f"{folder / 'tokenizer.json'} has token {tokens[token]} ({token}), but config.json has "
            f"an embedding of vocab_size={vocabulary}: resize the embedding, or take the model's "
            "own tokenizer."
        )
    generation = _read(folder / "generation_config.json")
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = generation.get(key)
        for number in ids if isinstance(ids, list) else [ids]:
            if isinstance(number, int) and not 0 <= number < vocabulary:
                raise ValueError(
                    f"{folder / 'generation_config.json'} has {key}={ids}, but config.json has "
                    f"vocab_size={vocabulary}: copy the file from where the model came from."
                )


def _processors(folder: Path) -> Iterator[tuple[str, Values]]:
    """Yield (file, values) of each image and video processor."""
    for name in _PROCESSORS:
        yield name, _read(folder / name)
    joint = _read(folder / "processor_config.json")
    for section in ("image_processor", "video_processor"):
        if isinstance(joint.get(section), dict):
            yield "processor_config.json", joint[section]


def _tokens(folder: Path) -> dict[str, int]:
    """Return the tokens of tokenizer.json and their ids, {} if the folder has no such file."""
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return tokens | {item["content"]: item["id"] for item in tokenizer.get("added_tokens", [])}


def _read(path: Path) -> Values:
    """Return the values of a JSON file, {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object: download it again.")
    return values
