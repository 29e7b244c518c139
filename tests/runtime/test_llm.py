"""The whole runtime against transformers' own generation, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench.errors import QbenchError
from qbench.models.source import open_model
from qbench.runtime.llm import LLM
from qbench.runtime.request import SamplingParams
from tests.tiny import make_tiny_llama

NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
SHARED = [(11 * i) % 290 + 3 for i in range(40)]
PROMPTS = [SHARED[: 2 * n] + [(n * n + 7 * j) % 290 + 3 for j in range(n)] for n in range(1, 21)]


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> list[list[int]]:
    """transformers' greedy tokens, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None}
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        found.append(out[0, len(prompt) :].tolist())
    return found


def small(model: Path, **settings: Any) -> LLM:
    return LLM(model, device="cpu", dtype="float32", **({"num_blocks": 256, "block_size": 8} | settings))


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    llm.engine.scheduler.check_integrity()
    return found


@pytest.mark.trap(52)
@pytest.mark.parametrize("caching", [True, False])
def test_alone_equals_transformers(tiny_llama: Path, reference: list[list[int]], caching: bool) -> None:
    llm = small(tiny_llama, enable_prefix_caching=caching)
    for prompt, expected in zip(PROMPTS, reference, strict=True):
        assert tokens(llm, [prompt]) == [expected]
    assert (llm.engine.scheduler.num_reused_tokens > 0) == caching


@pytest.mark.trap(51)
@pytest.mark.filterwarnings("ignore:The key-value cache")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 256])
@pytest.mark.parametrize("budget", [13, 2048])
def test_in_one_batch_equals_transformers(
    tiny_llama: Path, reference: list[list[int]], caching: bool, num_blocks: int, budget: int
) -> None:
    llm = small(tiny_llama, enable_prefix_caching=caching, num_blocks=num_blocks, max_num_batched_tokens=budget)
    assert tokens(llm, PROMPTS) == reference
    assert tokens(llm, PROMPTS) == reference
    assert (llm.engine.scheduler.num_preemptions > 0) == (num_blocks == 12)


@pytest.mark.trap(49)
def test_a_prompt_of_whole_blocks_twice(tiny_llama: Path) -> None:
    llm = small(tiny_llama)
    prompt = SHARED[:32]
    first = tokens(llm, [prompt])
    assert tokens(llm, [prompt]) == first
    assert llm.engine.scheduler.num_reused_tokens == 24


def test_seeded_requests_alone_and_in_a_batch(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NEW, seed=3, ignore_eos=True)
    llm = small(tiny_llama)
    assert tokens(llm, PROMPTS, params) == [tokens(llm, [prompt], params)[0] for prompt in PROMPTS]


def test_scored_rows_have_transformers_logits(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    llm = small(tiny_llama, max_num_batched_tokens=17)
    for prompt, hidden in zip(PROMPTS, llm.engine.encode(PROMPTS), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(llm.engine.logits(hidden), expected, atol=1e-4, rtol=0)


@pytest.mark.trap(54)
def test_the_stream_joins_to_the_text(tiny_llama: Path) -> None:
    llm = small(tiny_llama)
    params = SamplingParams(temperature=0, max_tokens=60)
    output = llm.generate("the 😀 said", params)[0]
    assert "".join(llm.stream("the 😀 said", params)) == output.outputs[0].text
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert output.prompt_token_ids == llm.tokenizer("the 😀 said")["input_ids"]


def test_leaving_a_stream_ends_its_request(tiny_llama: Path) -> None:
    llm = small(tiny_llama)
    stream = llm.stream("the", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    other = tokens(llm, [PROMPTS[3]])  # goes on while the stream waits
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished()
    assert llm.engine.scheduler.pool.num_available == 256
    assert tokens(llm, [PROMPTS[3]]) == other


@pytest.mark.trap(44)
def test_chat_has_the_beginning_token_once(tiny_llama: Path) -> None:
    llm = small(tiny_llama)
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.chat_prompt(messages)
    assert llm.tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.count(llm.tokenizer.bos_token_id) == 2  # one a message
    assert llm.chat(messages, GREEDY).prompt_token_ids == prompt


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(QbenchError, match="has no chat template"):
        small(folder).chat([{"role": "user", "content": "hi"}])


@pytest.mark.trap(34)
def test_end_tokens_of_all_configs_stop(tmp_path: Path, tiny_llama: Path) -> None:
    first = tokens(small(tiny_llama), [PROMPTS[4]])[0]
    folder = make_tiny_llama(tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [0, {first[6]}]}}')
    output = small(folder).generate([PROMPTS[4]], SamplingParams(temperature=0, max_tokens=NEW))[0].outputs[0]
    assert output.token_ids == first[: first.index(first[6]) + 1]
    assert output.finish_reason == "stop"


@pytest.mark.trap(57)
def test_one_bad_prompt_stops_the_batch_before_it_runs(tiny_llama: Path) -> None:
    llm = small(tiny_llama, max_model_len=32)
    for bad, message in (
        ([], "Prompt 1 has no tokens"),
        ("", "Prompt 1 has no tokens"),
        ([5] * 32, "Prompt 1 has 32 tokens; at most 31 are allowed"),
        ([300], "Prompt 1 has token ids outside the vocabulary; 0 to 299"),
        (7, "A prompt is 7; it must be a text or a list of token ids"),
    ):
        with pytest.raises(QbenchError, match=message):
            llm.generate(["good", bad], GREEDY)  # type: ignore[list-item]
        assert not llm.engine.has_unfinished()
    with pytest.raises(QbenchError, match="2 sampling parameters for 1 prompts"):
        llm.generate("good", [GREEDY, GREEDY])
    output = llm.generate([[5] * 31], SamplingParams(temperature=0, max_tokens=10**9, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "max_model_len is 513; .* at most 512"),
        ({"block_size": 0, "num_blocks": None}, "block_size is 0; it must be at least 1"),
        ({"num_blocks": 0}, "num_blocks is 0; it must be at least 1"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown; allowed: auto"),
        ({"device": "tpu"}, "Device 'tpu' is unknown; allowed: auto"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny_llama: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(QbenchError, match=message):
        LLM(tiny_llama, **settings)


def test_the_default_cache_holds_what_the_requests_may_need(tiny_llama: Path) -> None:
    llm = LLM(open_model(tiny_llama), max_num_seqs=2, max_model_len=100)
    assert llm.engine.settings.num_blocks == 14
    assert llm.dtype == torch.float32 or llm.device.type == "cuda"


def test_a_cache_too_small_for_one_request_is_said(tiny_llama: Path) -> None:
    with pytest.warns(UserWarning, match=r"holds 32 tokens; requests may have that many instead of 512"):
        small(tiny_llama, num_blocks=4)


def test_broken_logits_end_a_batch_and_leave_the_engine_usable(
    tiny_llama: Path, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small(tiny_llama)
    logits, calls = llm.runner.logits, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        found = logits(hidden)
        return found * float("nan") if len(calls) == 5 else found

    monkeypatch.setattr(llm.runner, "logits", broken)
    with pytest.raises(QbenchError, match="NaN or infinite"):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.has_unfinished()
    assert tokens(llm, PROMPTS) == reference


def test_a_prompt_that_is_no_unicode_text_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(QbenchError, match="no Unicode text"):
        small(tiny_llama).generate("abc\udcff")
