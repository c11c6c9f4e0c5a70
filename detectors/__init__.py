"""Where faults of hardware are seen: documents that a cluster's own detectors leave, and programs that report lines."""
