# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of sub-commands of `hf-gr`, one a module; `hf_gr.commands.app` registers them. Needs typer and rich."""
