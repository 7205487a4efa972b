#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image: it lies in /autograder/source then.
# The base image must have Python 3.10 or newer: Ubuntu 22.04 is old enough.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c "import ensurepip" || { apt-get update && apt-get install -y python3-venv; }
python3 -m venv venv
venv/bin/pip install -r source/labs/requirements.txt
