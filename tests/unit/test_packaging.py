"""The repository, the links and the wheel hold the same modules."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LAYERS = ("passes", "scheduler", "runtime")


@pytest.mark.parametrize("layer", LAYERS)
def test_link_points_at_layer(layer: str) -> None:
    assert (ROOT / "backhaul" / layer).samefile(ROOT / layer)


def test_layers_import_under_one_name() -> None:
    assert not [m for m in sys.modules if m.split(".")[0] in LAYERS]


def test_wheel_holds_every_module(tmp_path: pathlib.Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-q",
            "-w",
            tmp_path,
            ROOT,
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    built = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    tree = {
        f"backhaul/{p.relative_to(ROOT)}"
        for d in LAYERS
        for p in (ROOT / d).rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    tree |= {f"backhaul/{p.name}" for p in (ROOT / "backhaul").iterdir() if p.is_file()}
    assert built == tree
