# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a new user does first, with an installed hf_gr and without a checkout: `python smoke.py README.md EXTRAS`."""

import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path


def run(*arguments: str) -> str:
    """What a command prints, and its exit code."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}exit code {done.returncode}"


def expect(text: str, *parts: str) -> None:
    """End the program unless a text has all parts."""
    missing = [part for part in parts if part not in text]
    if missing:
        sys.exit(f"{missing} expected in:\n{text}")


def main(readme: Path, extras: str) -> None:
    """Import, help, README's code, and with extras the command line."""
    import hf_gr

    folder = Path(hf_gr.__file__).parent
    expect(str(folder), "site-packages")
    expect(" ".join(path.name for path in folder.iterdir()), "py.typed")
    expect(pydoc.render_doc(hf_gr), hf_gr.__version__, "ConstraintIndex", "GRGenerationMixin")

    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, readme.name, "exec"), namespace)

    if not extras:
        try:
            hf_gr.recommend("me/recommender", [["B01"]])
        except ImportError as error:
            expect(str(error), 'pip install "hf-gr[tables]"')
        else:
            sys.exit("hf_gr.recommend needs no extra here")
        return
    expect(run("hf-gr", "--version"), f"hf-gr {hf_gr.__version__}", "exit code 0")
    expect(run("hf-gr", "--help"), "--install-completion", "recommend", "exit code 0")
    facts = json.loads(subprocess.check_output(["hf-gr", "env", "--json"]))
    expect(str(facts["extras"]), "'cli': []", "'tables': []", "'flax': ['flax")
    Path("items.csv").write_text("item_id,first,second\nred,1,2\nblue,1,3\n", encoding="utf-8")
    built = run(*"hf-gr index build items.csv --sequence first --sequence second --output films".split())
    expect(built, "2 items", "exit code 0")
    assert hf_gr.ConstraintIndex.from_pretrained("films").items([[1, 3]]) == [["blue"]]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    print("smoke test passed")
