# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A Gradio Space that shows the page of `hf-gr serve --page`, in a frame, from one process.

python app.py         # http://127.0.0.1:7860; the first start trains the demo's recommender
python app.py --fast  # one that is trained for seconds
"""

import os
import sys
from pathlib import Path

import gradio
import uvicorn
from huggingface_hub import snapshot_download

from hf_gr import Engine
from hf_gr.demo.run import DemoSettings, run_demo
from hf_gr.serving.app import make_app
from hf_gr.serving.page import add_page, find_titles

ABOUT = "Films by [hf_gr](https://github.com/hf-gr/hf_gr): every recommendation is an item of the catalogue."
FRAME = '<iframe src="/page/" title="hf_gr" style="width: 100%; height: 1150px; border: 0"></iframe>'


def find_model() -> Path:
    """The folder of a model, its catalogue and its titles."""
    name = os.environ.get("HF_GR_MODEL")
    if name:
        return Path(snapshot_download(name))
    settings = DemoSettings.fast() if "--fast" in sys.argv else DemoSettings()
    return run_demo(settings).folder


def make_space() -> gradio.Blocks:
    """Gradio's part: the page in a frame."""
    with gradio.Blocks(title="hf_gr") as blocks:
        gradio.Markdown(ABOUT)
        gradio.HTML(FRAME)
    return blocks


def main() -> None:
    folder = find_model()
    engine = Engine(str(folder), str(folder))
    # Visitors, who come through a proxy, may change items and rules, but not have the Space load what they like.
    key = os.environ.get("HF_GR_ADMIN_KEY")
    app = make_app(engine, admin_key=key, is_public=True, takes_indexes=False)
    add_page(app, engine, find_titles(None, folder), home=False)
    app = gradio.mount_gradio_app(app, make_space(), path="/")
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("PORT", "7860")), log_level="warning")


if __name__ == "__main__":
    main()
