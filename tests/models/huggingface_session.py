"""What a stranger does with an exported folder; run by test_huggingface.py in a clean process.

    python -I huggingface_session.py '{"path": [...], "folder": ..., ...}'

Prints one JSON object. Nothing of the repository can be imported here, nor what it needs beside
torch, transformers and sentencepiece.
"""

import json
import sys

request = json.loads(sys.argv[1])
sys.path[:] = request["path"]
BLOCKED = {
    *("kernels", "models", "data_prep", "eval", "pretrain", "launch"),
    *("pydantic", "typer", "rich", "deepspeed", "ray", "streaming", "accelerate"),
}


class Hiding:
    """A finder that does not see some packages, as if they were not installed."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

torch.set_num_threads(1)
folder = request["folder"]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
out = {"version": transformers.__version__}

out["ids"] = [tokenizer(text, add_special_tokens=False).input_ids for text in request["texts"]]
out["with_bos"] = tokenizer(request["texts"][0]).input_ids
out["decoded"] = [tokenizer.decode(ids) for ids in out["ids"]]
out["specials"] = [
    tokenizer.decode([1, *out["ids"][0], 2]),
    tokenizer.decode([1, *out["ids"][0], 2], skip_special_tokens=True),
]
tokenizer.save_pretrained(request["scratch"] + "/tokenizer")
again = AutoTokenizer.from_pretrained(request["scratch"] + "/tokenizer", trust_remote_code=True)
out["ids_again"] = [again(text, add_special_tokens=False).input_ids for text in request["texts"]]

with torch.no_grad():
    rows = torch.tensor(request["rows"])
    out["logits"] = model(rows).logits.tolist()
    cached = model(rows[:, :7], use_cache=True)
    more = model(rows[:, 7:], past_key_values=cached.past_key_values)
    out["cached_logits"] = torch.cat([cached.logits, more.logits], 1).tolist()
    labels = rows.clone()
    labels[:, :3] = -100
    out["loss"] = float(model(rows, labels=labels).loss)

    batch = tokenizer(request["prompts"], return_tensors="pt", padding=True)
    out["padded_with"] = int(batch.input_ids[batch.attention_mask == 0].unique())
    new = model.generate(**batch, max_new_tokens=request["new"], do_sample=False)
    out["greedy"] = new[:, batch.input_ids.shape[1] :].tolist()
    without = model.generate(**batch, max_new_tokens=request["new"], use_cache=False)
    out["greedy_without_cache"] = without[:, batch.input_ids.shape[1] :].tolist()
    beams = [
        model.generate(**batch, max_new_tokens=6, num_beams=3, use_cache=use).tolist()
        for use in (True, False)
    ]
    out["beams"], out["beams_without_cache"] = beams
    padded = model(**batch).logits
    out["padded_logits"] = [padded[i][batch.attention_mask[i] == 1].tolist() for i in range(3)]

    out["errors"] = []
    right = batch.input_ids.flip(1), batch.attention_mask.flip(1)
    too_long = torch.zeros(1, request["max_seq_len"] + 1, dtype=torch.int64)
    for call in (
        lambda: model(right[0], attention_mask=right[1], use_cache=True),
        lambda: model(too_long),
        lambda: model(rows, inputs_embeds=torch.zeros(1)),
    ):
        try:
            call()
            out["errors"].append("none")
        except ValueError as error:
            out["errors"].append(str(error))

    half = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16
    )
    out["half_dtypes"] = {name: str(p.dtype) for name, p in half.named_parameters()}
    out["half_logits"] = half(rows).logits.float().tolist()
    new = half.generate(rows[:, :5], max_new_tokens=3, do_sample=False)
    out["half_generates"] = list(new.shape)

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
torch.manual_seed(5)
fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
half = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.bfloat16)
out["fresh_logits_are_finite"] = [
    bool(made(rows).logits.isfinite().all()) for made in (fresh, half)
]
out["fresh_dtypes"] = sorted({str(parameter.dtype) for parameter in half.parameters()})
out["fresh_differs"] = not torch.equal(fresh.model.embedding.weight, model.model.embedding.weight)
out["config"] = [config.vocab_size, config.hidden_size, config.max_position_embeddings]
model.save_pretrained(request["scratch"] + "/model")
out["imported"] = sorted(BLOCKED & {name.split(".")[0] for name in sys.modules})
print(json.dumps(out))
