"""The tokenizer as transformers sees it: the same ids, the same exact decoding.

Special tokens are added, never read: "<s>" in a text is text. A sequence starts with bos, as every
document did in training; `add_special_tokens=False` gives the text alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from data_prep.tokenizer import Tokenizer

FILE_NAME = "tokenizer.model"


class FenwickTokenizer(PreTrainedTokenizer):
    """Ids of data_prep.tokenizer.Tokenizer; padding is on the left, with the unknown piece, which
    no text ever becomes."""

    vocab_files_names = {"vocab_file": FILE_NAME}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(self, vocab_file: str, add_bos_token: bool = True, **kwargs: Any) -> None:
        self.text = Tokenizer.load(vocab_file)
        self.pieces = [self.text.piece(i) for i in range(self.text.vocab_size)]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.add_bos_token = add_bos_token
        named = {
            "bos_token": self.pieces[self.text.bos_id],
            "eos_token": self.pieces[self.text.eos_id],
            "unk_token": self.pieces[0],
            "pad_token": self.pieces[0],
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        }
        super().__init__(add_bos_token=add_bos_token, **{**named, **kwargs})

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {**self.ids, **self.added_tokens_encoder}

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self.pieces[i] for i in self.text.encode(text)]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return self.text.decode(self.ids[token] for token in tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        start = [self.text.bos_id] if self.add_bos_token else []
        return start + token_ids_0 + (token_ids_1 or [])

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        if already_has_special_tokens:
            return [int(i in self.all_special_ids) for i in token_ids_0]
        zeros = [0] * (len(token_ids_0) + len(token_ids_1 or []))
        return [1] * self.add_bos_token + zeros

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        path = Path(save_directory) / f"{prefix}{FILE_NAME}"
        path.write_bytes(self.text.model)
        return (str(path),)

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index]

    def _decode(
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **kwargs: Any
    ) -> str:
        """Bytes of consecutive text tokens are joined before they become characters."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if i in self._added_tokens_decoder:
                parts.append(self.text.decode(run))
                run = []
                token = self._added_tokens_decoder[i]
                if not (skip_special_tokens and token.special):
                    parts.append(str(token))
            else:
                run.append(i)
        return "".join([*parts, self.text.decode(run)])
