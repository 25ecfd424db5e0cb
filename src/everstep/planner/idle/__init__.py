"""What is worked out while there is nothing to do: answers to the next loss, and better schedules."""
