"""The config.json of an exported folder, as transformers sees it."""

from typing import Any

from transformers import PretrainedConfig


class FenwickConfig(PretrainedConfig):
    """Carries the model's own settings under `fenwick`; the other fields are for generic tools.

    fenwick: {"format_version": 1, "model": every setting of the model}, as in a model directory.
    """

    model_type = "fenwick"

    def __init__(self, fenwick: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.fenwick = fenwick if fenwick is not None else {}
        model = self.fenwick.get("model", {})
        self.vocab_size = model.get("vocab_size", 0)
        self.hidden_size = model.get("d_model", 0)
        self.num_hidden_layers = model.get("num_layers", 0)
        self.max_position_embeddings = model.get("max_seq_len", 0)
        self.use_cache = kwargs.pop("use_cache", True)
        for derived in ("vocab_size", "hidden_size", "num_hidden_layers"):
            kwargs.pop(derived, None)
        kwargs.pop("max_position_embeddings", None)
        # The model ties its embeddings itself where it does; transformers is not to tie anything.
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)
