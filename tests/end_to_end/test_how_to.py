"""Every code block of the how-to pages runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
NEEDED = {
    "from accelerate": "accelerate",
    "transformers.Trainer": "accelerate",
    "import lightning": "lightning",
}


@pytest.mark.filterwarnings("default")  # Those of trainers are not ours.
@pytest.mark.parametrize("block", BLOCKS)
def test_a_code_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, package in NEEDED.items():
        if text in block:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})  # our own pages
