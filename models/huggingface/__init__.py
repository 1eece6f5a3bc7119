"""What an exported folder runs inside transformers; folder.py makes the files."""
