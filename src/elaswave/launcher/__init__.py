"""Starting a job and looking after its processes, on one machine or as one host of several."""
