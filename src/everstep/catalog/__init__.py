"""What is shipped: texts, clusters, workloads, each with its licence."""
