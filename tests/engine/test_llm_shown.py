"""What an LLM shows of itself and of its work."""

from __future__ import annotations

from hybridattn import LLM, SamplingParams


def test_progress_counts_on_one_line_and_reprs_are_short(capsys):
    with LLM("dummy:tiny", policy="sync_offload", gpu_kv_blocks=8, cpu_kv_blocks=8) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        outputs = llm.generate([[1] * 50, [2, 3]], params, progress=True)
        assert capsys.readouterr().err.endswith("\r2 of 2 answers, 8 tokens\n")
        llm.generate([[1]], params)
        assert capsys.readouterr().err == ""
        assert repr(llm) == "<LLM tiny on host, sync_offload>"
        assert repr(outputs[0]).endswith("4 tokens, length, gpu tier>") and len(repr(outputs[0])) < 150
        trace, records = llm.trace(), llm.take_records()
        assert trace.spans and len(repr(trace)) < 300 and len(repr(records)) < 300
