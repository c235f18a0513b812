"""Read, write, lock, journal and publish files, on the local disk or on the Hugging Face Hub."""
