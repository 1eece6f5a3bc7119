"""What an exported folder runs inside transformers; models/huggingface/code.py makes the files."""
