"""Rules of the data section; see rules.py."""

from megavlm.config.schema import Data


def check_data(data: Data) -> None:
    low, high = data.min_pixels, data.max_pixels
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"data.min_pixels={low} is above data.max_pixels={high}: lower it or raise the other"
        )
    if data.max_prompt_tokens > data.pack_tokens:
        raise ValueError(
            f"data.pack_tokens={data.pack_tokens} cannot hold a prompt of "
            f"data.max_prompt_tokens={data.max_prompt_tokens}: raise it or lower the other"
        )
    if (data.prompt_key is None) != (data.question is not None):
        raise ValueError(
            f"data.question={data.question} with data.prompt_key={data.prompt_key or 'null'}: a "
            "question for every row goes with data.prompt_key=null, and only with it"
        )
    weights, entries = data.train_weights, data.train_files
    if weights and len(weights) != len(entries):
        raise ValueError(
            f"data.train_weights has {len(weights)} weights for {len(entries)} entries of "
            "data.train_files: give one for each entry, or none"
        )
