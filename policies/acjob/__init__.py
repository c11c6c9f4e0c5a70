"""From a MindCluster AscendJob to a midstep policy: what its labels and annotations ask for, in our words."""
