"""Detection of hardware faults: documents that a cluster's detectors write, and lines that other programs report."""
