"""The engine loop, requests on their way in and out, sessions, replay of workloads."""
