"""SmolLM2-135M-Instruct in NumPy, and what is captured from it. See scripts/capture_smollm2.py."""
