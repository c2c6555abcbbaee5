"""Model folders with random weights of a release's shape, for servers.

python -m tests.gpu.folder FOLDER RELEASE

The tokenizer is a small trained one, filled up with words to the length of Qwen's, so that a server
computes logits of a released vocabulary, and as many ids as there are without text.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from megavlm.demo.tiny_model import _save_processor, make_tiny_model, train_tokenizer
from megavlm.models.common.qwen_tiny import TOKENS
from megavlm.models.common.tiny import tiny_family
from megavlm.parallel import platform
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from tests.gpu import shapes
from tests.support.releases import RELEASES

QUESTIONS = ["How many circles are there?", "What colour is the square?"] * 20
LENGTH = 151665  # of Qwen2.5's tokenizer


def make_folder(folder: Path, release: str, layers: int | None = None, **tiny: int) -> None:
    """Write the folder of a release, cut to its first layers, or of a tiny model of its family on a
    CPU. tiny: The sizes of the tiny one.
    """
    if shapes.is_tiny():
        family = RELEASES[release]["model_type"]
        make_tiny_model(folder, QUESTIONS, seed=0, family=family, **shapes.TINY[family] | tiny)
        return
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText, GenerationConfig

    tokenizer = long_tokenizer(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in TOKENS.special}
    config = shapes.config_of(release, layers)
    config.image_token_id, config.video_token_id = ids["<|image_pad|>"], ids["<|video_pad|>"]
    config.vision_start_token_id = ids["<|vision_start|>"]
    config.vision_end_token_id = ids["<|vision_end|>"]
    ends = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    for name, value in ends.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    with torch.device(platform.device()):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    processor = tiny_family(config.model_type).processor(config, tokenizer, None)
    _save_processor(folder, processor)


def long_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer with words that no text has, up to LENGTH tokens."""
    tokenizer = train_tokenizer(QUESTIONS, TOKENS, max_vocab=512)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]  # special tokens follow it, wherever it ends
    words = range(len(vocabulary), LENGTH - len(TOKENS.special))
    vocabulary |= {f"word {i}": i for i in words}
    path.write_text(json.dumps(values))
    return PreTrainedTokenizerFast.from_pretrained(folder)


if __name__ == "__main__":
    platform.install()
    make_folder(Path(sys.argv[1]), sys.argv[2])
