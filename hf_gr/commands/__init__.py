# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of `hf-gr`, one group per module; `hf_gr.commands.app` registers them. Needs typer and rich."""
