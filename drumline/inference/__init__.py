"""Use a trained model: chat with it, evaluate it, push it to the hub, serve it."""
