"""A process ends well while a thread reads a large vocabulary or compiles: none is inside of llguidance at the end."""

import pytest

from tests.support.rows import cases
from tests.support.running import start_python

READING = """
import time
from tests.guidance.random_sampler import sampler
from vllm_mlx.formats.families import CALL_FORMATS
from vllm_mlx.guidance.grammar_compiler import GrammarCompiler
from vllm_mlx.guidance.names import CheckpointNames

one = sampler()
CheckpointNames(one.tokenizer, CALL_FORMATS["hermes"], GrammarCompiler(one.tokenizer, 400_000))
time.sleep({after_s})
"""
COMPILING = """
import threading
from llguidance import LLMatcher
from tests.guidance.random_sampler import sampler
from vllm_mlx.guidance.grammar_compiler import on_large_stack

vocabulary = sampler().compiler.read_vocabulary()
started = threading.Event()

def compile():
    started.set()
    for number in range(30):
        LLMatcher(vocabulary, f"start: /(|a){{{{{after_s},2{{number:03}}}}}}/", log_level=0)

threading.Thread(target=on_large_stack, args=(compile,), daemon=True).start()
started.wait()
"""


@pytest.mark.parametrize(
    "code",
    cases([READING.format(after_s=0.4), COMPILING.format(after_s=1)], [COMPILING.format(after_s=1)]),
    ids=["reading", "compiling"],
)
def test_python_ends_in_the_middle(code: str) -> None:
    process = start_python(code)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
