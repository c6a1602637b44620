"""Methods side by side on one model: time by kind of pass, what the weights alone cost, memory and compile time."""
