"""What a model says and how likely a text is do not depend on which prompts share a batch."""

import pytest
import torch

from eval import niah
from eval.completion import complete, score_continuations
from eval.result import Options, Subject
from eval.samples import SampleStore, read_samples
from eval.scoring import Window, score, window_batches
from models.config import ModelConfig
from models.initialize import initialize
from models.language_model import LanguageModel

MIXERS = ("log_linear_mamba2", "log_linear_gated_deltanet", "attention")


@pytest.fixture(scope="module")
def models(tokenizer):
    """Untrained ones with wide weights, so that their answers differ from prompt to prompt."""
    made = {}
    for mixer in MIXERS:
        config = ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=32,
            num_layers=2,
            mixer=mixer,
            max_seq_len=1024,
            init_std=0.4,
            mlp={"hidden_size": 32},
            mamba2={"head_size": 16, "state_size": 16},
            gated_deltanet={"num_heads": 2, "key_size": 16, "value_size": 16},
            attention={"num_heads": 2},
        )
        made[mixer] = LanguageModel(config)
        initialize(made[mixer], 1)
        made[mixer].eval()
    return made


def prompts(tokenizer, count):
    random = torch.Generator().manual_seed(0)
    lengths = [3 + (7 * i) % 41 for i in range(count)]
    return [
        [1, *torch.randint(3, tokenizer.vocab_size, (n,), generator=random).tolist()]
        for n in lengths
    ]


@pytest.mark.parametrize("mixer", MIXERS)
def test_answers_of_16_unequal_prompts_are_those_of_each_alone(models, tokenizer, mixer):
    asked = prompts(tokenizer, 16)

    def answers(batch_tokens):
        return list(
            complete(
                models[mixer], asked, max_new_tokens=6, stop_ids=(2,), batch_tokens=batch_tokens
            )
        )

    alone, together = answers(1), answers(16 * 64)
    assert alone == together
    assert len({tuple(answer) for answer in alone}) > 8


@pytest.mark.parametrize("mixer", MIXERS)
def test_scores_of_16_unequal_windows_are_those_of_each_alone(models, tokenizer, mixer):
    windows = [Window(ids[:-1], ids[-3:]) for ids in prompts(tokenizer, 16)]
    alone, together = (
        list(score(models[mixer], window_batches(windows, batch_tokens)))
        for batch_tokens in (1, 16 * 64)
    )
    for a, b in zip(alone, together, strict=True):
        assert a.nll == pytest.approx(b.nll, rel=1e-5)
        assert (a.tokens, a.hits) == (b.tokens, b.hits)


@pytest.mark.parametrize("mixer", MIXERS)
def test_continuations_score_as_in_the_whole_text(models, tokenizer, mixer):
    """One reading of the prompt and its state, against logits of prompt and continuation."""
    prompt, *others = prompts(tokenizer, 6)
    continuations = [ids[1 : 2 + i] for i, ids in enumerate(others)]
    found = score_continuations(models[mixer], prompt, continuations, "cpu")
    windows = [Window([*prompt, *ids[:-1]], ids) for ids in continuations]
    expected = list(score(models[mixer], window_batches(windows, 1)))
    for a, b in zip(found, expected, strict=True):
        assert a.nll == pytest.approx(b.nll, rel=1e-4)
        assert (a.tokens, a.hits) == (b.tokens, b.hits)


def test_niah_scores_the_same_with_1_and_16_prompts_in_a_batch(models, tokenizer, tmp_path):
    logs = []
    for batch_tokens in (1, 16 * 600):
        folder = tmp_path / str(batch_tokens)
        subject = Subject(
            model=models["log_linear_mamba2"],
            vocab_size=tokenizer.vocab_size,
            max_seq_len=1024,
            tokenizer=tokenizer,
            device="cpu",
            samples=SampleStore(folder, "aa", "tt"),
        )
        options = Options(lengths=(600,), answer_tokens=6, samples=16, batch_tokens=batch_tokens)
        niah.niah(subject, options)
        ((_, done),) = read_samples(folder)
        logs.append(done)
    alone, together = logs
    assert [one["answer"] for one in alone.values()] == [one["answer"] for one in together.values()]
    for key, values in alone.items():
        for metric in niah.UNITS:
            assert values[metric] == pytest.approx(together[key][metric], rel=1e-4, abs=1e-4)


def test_an_answer_ends_where_it_is_finished(models, tokenizer):
    for model in (models["attention"], lambda tokens: torch.ones(*tokens.shape, 400)):
        (answer,) = complete(
            model,
            prompts(tokenizer, 1),
            max_new_tokens=9,
            stop_ids=(),
            batch_tokens=1,
            finished=lambda new: len(new) == 4,
        )
        assert len(answer) == 4
