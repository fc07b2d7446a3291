"""The other trainers, each as a script that trains a workload and writes what it did to ``record.json``."""
