"""vLLM in a process of its own, which may run in another Python: run by path, imports no headsmith.

Reads one JSON object a line from standard input and writes one a line to what was its standard
output; vLLM's own prints go to standard error. First comes {"model", "engine"} (arguments of
vllm.LLM), answered by {"ready": vLLM's version, "context"}; then {"prompts": [ids], "sampling":
[arguments of vllm.SamplingParams]}, answered by {"ids", "cut"} for each in its order; anything that
goes wrong by {"fault"}.
"""

import json
import os
import sys


def main() -> None:
    """Answer until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # vLLM and its own processes print to standard output.
    os.dup2(2, 1)

    def reply(line: dict[str, object]) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    try:
        first = json.loads(sys.stdin.readline())
        # Launched by path: the files beside this one are nobody's modules.
        here = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
        import vllm

        model = vllm.LLM(model=first["model"], **first["engine"])
        reply({"ready": vllm.__version__, "context": context_of(model)})
        for text in sys.stdin:
            asked = json.loads(text)
            prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
            sampling = [vllm.SamplingParams(**arguments) for arguments in asked["sampling"]]
            for output in model.generate(prompts, sampling, use_tqdm=False):
                one = output.outputs[0]
                reply({"ids": list(one.token_ids), "cut": one.finish_reason == "length"})
    except Exception as error:
        said = " ".join(str(error).split())
        reply({"fault": f"{type(error).__name__}: {said[-400:]}"})
        raise


def context_of(model: object) -> int:
    """Tokens that fit, prompt and answer together."""
    for holder in (model, getattr(model, "llm_engine", None)):
        config = getattr(holder, "model_config", None)
        if config is not None:
            return int(config.max_model_len)
    raise RuntimeError("this vLLM does not say how long its context is")


if __name__ == "__main__":
    main()
