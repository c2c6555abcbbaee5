"""Tokens of sampled responses by their probability, from the writer to the page."""

from math import log
from pathlib import Path

import pytest

from megavlm.config.data import Data
from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.observability.records import read_records
from megavlm.observability.report import spans, write_report
from megavlm.observability.samples import SAMPLES_FILE, SAMPLES_FOLDER
from tests.unit.observability.runs import group, write_run


def test_neighbours_of_a_class_are_one_span() -> None:
    chances = (("It ", 0.9), ("is", 0.81), (" 3", 0.1), (" or", 0.19), (" 4", 0.3), ("!", 0.7))
    turn = {"text": "It is 3 or 4! I think", "tokens": [(t, log(p)) for t, p in chances]}
    expected = [("", "It is"), ("p3", " 3 or"), ("p2", " 4"), ("p1", "!"), ("", " I think")]
    assert spans(turn, 100) == expected
    assert spans(turn, 7) == [("", "It is"), ("p3", " 3 [... 3 more characters]")]


def test_the_end_token_is_left_out_and_without_tokens_there_are_no_spans() -> None:
    tokens = [("<box>", log(0.3)), ("\n3", 0.0), ("\n", 0.0)]
    expected = [("p2", "<box>"), ("", "\n3\n")]
    assert spans({"text": "3", "tokens": tokens}, 99) == expected
    assert spans({"text": "3", "tokens": [*tokens, ("<|im_end|>", 0.0)]}, 99) == expected
    assert spans({"text": "", "tokens": [("<|im_end|>", 0.0)]}, 99) == []
    assert spans({"text": "3"}, 9) == []


def test_the_page_shows_colours_and_parts(tmp_path: Path) -> None:
    sampled = group(texts=["<b>3\x00"])
    later = {"message": "Again", "images": [], "text": "4", "tokens": lambda: [("4", -0.5)]}
    sampled["responses"][0] |= {
        "parts": {"format": 0.5},
        "tokens": lambda: [("<b>", -3.0), ("3\x00", 0.0)],
        "turns": [later],
    }
    write_run(tmp_path, groups=[sampled])
    record = read_records(tmp_path / SAMPLES_FOLDER / SAMPLES_FILE)[0]["responses"][0]
    assert record["tokens"] == [["<b>", -3.0], ["3\x00", 0.0]]
    page = write_report(tmp_path).read_text()
    assert '<i class="p3">&lt;b&gt;</i>3\\x00' in page and '<i class="p1">4</i>' in page
    assert "format 0.500" in page and "\x00" not in page


def test_pieces_are_whole_characters(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, ["How many? 1 2 3"] * 20, seed=0)
    processor = Processor(folder, Data(max_prompt_tokens=64), family_of(folder))
    ids = processor.encode_answer("How \u00e9 \u56f3 3")
    pieces = processor.pieces(ids)
    assert "".join(text for text, _ in pieces) == "How \u00e9 \u56f3 3<|im_end|>"
    assert sum(count for _, count in pieces) == len(ids) and max(n for _, n in pieces) > 1
    assert processor.pieces(processor.encode_answer("\u56f3")[:1]) == [("\ufffd", 1)]
