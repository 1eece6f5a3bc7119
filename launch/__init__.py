"""Starting `python -m pretrain` on many processes and machines; and the quickstart."""
