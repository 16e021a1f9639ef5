"""What tests of programs that embed cllm can use."""
