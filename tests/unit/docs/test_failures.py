"""Each failure of reduced precision is shown, detected and fixed by a script of docs/experiments/failures."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs/experiments/failures"

EXPECTED = {  # script and title of a failure: what is printed of it
    ("fp16_overflow", "A product overflows"): [
        r"fp32: 300 x 300 = 90000 .*bf16: 300 x 300 = 90112 .*fp16: 300 x 300 = inf",
        r"detected precision=fp16: the step is skipped, nonfinite_loss: forward loss is Inf .*weight is still 300",
        r"fixed precision=bf16: the step is applied, loss 90112",
        r"fixed precision=fp16 and the rule product: fp32: the step is applied, loss 90000",
    ],
    ("fp16_overflow", "A scaled gradient overflows"): [
        r"shown fp16: a gradient of 8 times a loss scale of 65536 = inf",
        r"detected precision=fp16: the step is skipped, overflow: local gradient of 'product.weight'.*still 1",
        r"fixed loss_scale=dynamic.* 4 skipped steps, then the step is applied, loss 8 at 4096",
        r"fixed loss_scale=calibrated: after 3 measured steps 512",
    ],
    ("lost_addends", "Small addends are lost"): [
        r"fp32: 1 \+ 1e-4 = 1.0001 .*bf16: 1 \+ 1e-4 = 1 .*fp16: 1 \+ 1e-4 = 1 ",
        r"bf16: 100 updates .* a weight from 1 to 1 shown fp16: 100 updates .* a weight from 1 to 1 detected",
        r"refused: master and output dtype are FP32 in every policy",
        r"precision=bf16, FP32 masters: .*: to 0\.9[89]\d+ fixed precision=fp16, FP32 masters: .*: to 0\.9[89]\d+$",
    ],
    ("lost_addends", "A sum in reduced precision stops growing"): [
        r"bf16: 4,096 ones added one by one = 256 .*fp16: 4,096 ones added one by one = 2,048",
        r"detected bf16: 93.8% is lost; .* lose 0.8% at most",
        r"fixed precision=bf16, a Linear of 4,096 ones, summed in FP32: 4,096",
    ],
    ("gradient_underflow", "Gradients underflow"): [
        r"shown fp16: a gradient of 1e-8 = 0",
        r"detected precision=fp16, loss_scale=none, at the start: .* are FP16: those below 6e-8 vanish; use a",
        r"detected then the step is applied, .*grad_norm 0 .*the weight is still 1 ",
        r"fixed precision=fp16, its own loss scale of 65536: .*grad_norm 9.99\d+e-09; the weight moves to 0.9995",
        r"fixed precision=bf16, its own loss scale of 1: .*grad_norm 1.00\d+e-08; the weight moves to 0.9995",
    ],
    ("unprotected_loss", "A loss is not protected"): [
        r"shown precision=fp16: the model's own loss of 300 x 300 = inf, torch.float16",
        r"detected engine.backward refuses it: the loss is torch.float16; the contract says float32",
        r"fixed precision=fp16, the loss of what the model returns.* 10 skips the step is applied, loss 90000 ",
        r"fixed precision=fp16, the model's own in dtrain.full_precision.* the step is applied, loss 90000 ",
    ],
    ("fp8_hides_overflow", "A cast hides an overflow"): [
        r"shown fp8 e4m3: Inf cast = 448",
        r"detected precision=fp8, one input of 256 is inf: the step is skipped, nonfinite_loss: .*loss is NaN",
        r"fixed precision=fp8, one input of 256 is 1: the step is applied, loss 16$",
    ],
}


@pytest.mark.parametrize(("script", "title"), EXPECTED)
def test_failure_is_shown_detected_and_fixed(script: str, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{script}.py"))
    blocks = [" ".join(block.split()) for block in capsys.readouterr().out.strip().split("\n\n")]
    assert [block.partition(":")[0] for block in blocks] == [title for name, title in EXPECTED if name == script]
    (section,) = (block for block in blocks if block.startswith(f"{title}:"))
    for pattern in EXPECTED[script, title]:
        assert re.search(pattern, section), f"{pattern}\nnot in\n{section}"


def test_the_page_has_every_script_and_what_one_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    scripts = {script for script, _ in EXPECTED}
    assert {path.stem for path in FOLDER.glob("*.py")} == {*scripts, "lesson"}
    assert all(f"[{script}.py](failures/{script}.py)" in page for script in scripts)
    runpy.run_path(str(FOLDER / "gradient_underflow.py"))
    assert capsys.readouterr().out in page
