"""The blocks of the questions, pasted while the demo is served; those that need another model have a reason."""

import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

from tests.project.sources import ROOT
from tests.support.commands import address, served

BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "docs/faq.md").read_text(encoding="utf-8"), re.DOTALL)
NOT_PASTED = {
    r"([A-Z_]+=\S+ )?vllm-mlx serve [mM~]": "needs a large model",
    r"curl http://Annas-Mac": "is another machine's",
}


def reason(block: str) -> str | None:
    return next((why for pattern, why in NOT_PASTED.items() if re.match(pattern, block)), None)


def test_each_reason_still_holds() -> None:
    for pattern in NOT_PASTED:
        assert any(re.match(pattern, block) for _, block in BLOCKS), pattern
    assert sum(reason(block) is None for _, block in BLOCKS) >= 3


def test_the_blocks_of_the_questions_are_answered(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "picture.png")
    with served("demo") as (_, started):
        for language, block in BLOCKS:
            if reason(block) is not None:
                continue
            here = block.replace("http://127.0.0.1:8000", address(started))
            command = ["bash", "-c", here] if language == "bash" else [sys.executable, "-c", here]
            result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert result.returncode == 0 and '"error"' not in result.stdout, f"{block}\n{result.stdout}{result.stderr}"
            for word, answer in (("image_url", "red"), ("json_schema", '{"sum"'), ("get_weather", "Paris")):
                if word in block:
                    assert answer in result.stdout.replace('{ "', '{"'), result.stdout
