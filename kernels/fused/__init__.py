"""What stands around the operators of a model, each as one kernel forward and one backward."""
