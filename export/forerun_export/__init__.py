"""What turns checkpoints into engine directories; production code imports only `forerun`."""
