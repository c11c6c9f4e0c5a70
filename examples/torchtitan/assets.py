"""Make the folder in which torchtitan's debug model finds its tokenizer and text: `python assets.py FOLDER`.

torchtitan's wheel has neither; its repository has them under the same names. These are made of the documentation in
Python's standard library.
"""

import json
import sys
from pathlib import Path

VOCABULARY = 2000  # the debug model has room for 2048
SOURCES = 120  # files of the standard library
WORDS = 200  # in each sample


def make_assets(folder: Path) -> Path:
    """Make what is missing in a folder, and return it."""
    text = folder / "tests" / "assets" / "c4_test" / "data.json"
    tokenizer = folder / "tests" / "assets" / "tokenizer"
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("".join(json.dumps({"text": sample}) + "\n" for sample in samples()))
    if not (tokenizer / "tokenizer.json").exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        special = ["<|begin_of_text|>", "<|end_of_text|>"]
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
        made.train_from_iterator(samples(), trainer)
        tokenizer.mkdir(parents=True, exist_ok=True)
        names = dict(zip(("bos_token", "eos_token"), special, strict=True))
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(names))
        made.save(str(tokenizer / "tokenizer.json"))
    return folder


def samples() -> list[str]:
    """Return pieces of the standard library's text, each of the same number of words."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:SOURCES]
    words = " ".join(path.read_text(errors="replace") for path in files).split(" ")
    return [" ".join(words[first : first + WORDS]) for first in range(0, len(words), WORDS)]


if __name__ == "__main__":
    make_assets(Path(sys.argv[1]))
