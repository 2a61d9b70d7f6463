"""``python engine_program.py JSON``: generate with ``sglang.Engine`` and print the texts as one JSON line."""

import json
import sys


def main() -> None:
    import sglang

    work = json.loads(sys.argv[1])
    engine = sglang.Engine(
        model_path=work["model"],
        schedule_policy=work["policy"],
        device="cpu",
        dtype="float32",
        attention_backend="pat",  # which leaves prefill to SGLang's default, and a CPU cannot run that
        prefill_attention_backend="torch_native",
        disable_cuda_graph=True,
        mem_fraction_static=0.3,
        max_total_tokens=8192,
        max_running_requests=32,
        log_level="info",
        nccl_port=work["port"],
    )
    answers = engine.generate(
        [request["prompt"] for request in work["requests"]],
        [
            {"temperature": 0, "max_new_tokens": request["max_tokens"], "ignore_eos": request["ignore_eos"]}
            for request in work["requests"]
        ],
    )
    engine.shutdown()
    print(json.dumps([answer["text"] for answer in answers]))


if __name__ == "__main__":  # SGLang's processes import this file again
    main()
