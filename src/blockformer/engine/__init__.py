"""Fast paths for particular processors. They plug into the model from outside; no published repo carries them.

Private names of the libraries, and what happens if one disappears. First those that the code of a published repo uses,
torch's (seen in 2.6 to 2.15) and transformers' (5.5 to 5.24):

- `_no_split_modules`, `_skip_keys_device_placement` (PreTrainedModel): `device_map` splits a layer, or copies a cache.
- `_tp_plan`, `_pp_plan` (heads): tensor and pipeline parallelism leave the head whole.
- `_supports_sdpa`, `_supports_flash_attn`, `_supports_flex_attn`, `_supports_attention_backend`,
  `_can_compile_fullgraph`, `_can_set_attn_implementation` (PreTrainedModel): other attention than eager is refused.
- `_can_record_outputs`, `_init_weights` (PreTrainedModel): no recorded attentions and states, no frequencies.
- `_tied_weights_keys`, `_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`, `_keys_to_ignore_on_load_unexpected`
  (PreTrainedModel): tied weights are saved twice, some float32 weights are cast, loading warns of spare weights.
- `_local_mapping` (AttentionInterface): AttributeError.
- `_attn_implementation` (config), `_get_resized_lm_head` and `_get_resized_embeddings` (PreTrainedModel), `_modules`
  (Module): AttributeError.
- `_prepare_cache_for_generation` (GenerationMixin): `generate` does not check lengths before the first step, and a
  prepared model takes each cache for the caller's.
- `_get_candidate_generator` (GenerationMixin): `use_mtp` looks for layers of transformers' own and finds none.
- `_loss_function`, `loss_type` (PreTrainedModel): a loss that the user sets (`model.loss_function = ...`) is not taken.
- `_is_stateful` (PreTrainedModel): a model with layers that keep a state is refused drafts by its layers, not before.
- `_sample`, `_beam_search` (GenerationMixin): `generate` writes by the library's loops, which are slower.
- `_get_default_generation_params` (GenerationConfig): some more fields are taken for generation settings.
- `_dict_from_json_file` (config of transformers): repeated keys and NaN in a config file are no longer refused.
- `_subclasses` (torch): AttributeError where inputs are checked.
- `_apply` (torch.nn.Module): a cast also casts the scales of 4-bit weights and the frequencies.
- `_hf_hook` (accelerate 1.x, awq_linear.py): on transformers up to 5.12, 4-bit weights on the disk are read wrong.

Then those that only the package uses:

- `_linear_pointwise`, `_reorder_linear_weight` (torch.ops.mkldnn), `_convert_weight_to_int4pack_for_cpu`,
  `_weight_int4pack_mm_for_cpu` (torch.ops.aten): each is tried before it is used; matmuls then stay
  torch's plain ones.
- `_inductor` (torch; `compile_fx.compile_fx`, `compile_fx_inner`): ImportError at the first compiled step.
- `_dynamo` (torch; `maybe_mark_dynamic`): AttributeError at the first compiled step.
- `_cuda_clearCublasWorkspaces` (torch._C): AttributeError where a GPU captures a step.
- `_pad_token_tensor`, `_eos_token_tensor` (of the settings of a call of `generate`): AttributeError in a model with
  compiled steps.
- `_mask_length` (of these settings): a cache that holds the beginning of a text goes to the library's loop.
- `_pytree` (torch.utils; `tree_map`): ImportError.
- `_make_wrapper_subclass` (torch.Tensor), `_schema` (of an operator), and of torch._C `DisableTorchFunctionSubclass`:
  AttributeError where weights are packed.
- `_current_level` (torch.autograd.forward_ad), `_C`, `_functorch` (torch): AttributeError in a prepared model; of the
  last `compile_utils.fx_graph_cse`: ImportError at the first compiled step.
- `_forward_hooks_with_kwargs`, `_forward_pre_hooks_with_kwargs` (torch.nn.Module): AttributeError where a prepared
  model writes.
- `_forward_hooks`, `_forward_pre_hooks`, `_backward_hooks`, `_backward_pre_hooks` (torch.nn.Module), `_version`
  (torch.Tensor): AttributeError where a loss is taken in chunks.
- `_weight_conversions` (PreTrainedModel): a repo of an earlier state of this package is saved under its earlier names.
- `_from_config` (PreTrainedModel): `AutoModelForPreTraining.from_config` does not know ELECTRA's class.
- `_remove_final_layer_norm` (OPTConfig of transformers): OPT converts no more.
- `_orig_mod` (of what `torch.compile` gives): such a model is not exported.
- `_parameters` (torch.nn.Module): AttributeError where weights are packed or have 4 bits.
- `_DisableFuncTorch` (torch._C): AttributeError where weights are packed.
- `_len_torch_dispatch_stack`, `_get_dispatch_mode`, `_TorchDispatchModeKey`, `_len_torch_function_stack`,
  `_get_function_stack_at` (torch._C): AttributeError.
- `_python_dispatch` (torch.utils; `_disable_current_modes`), and `DeviceContext` (torch.utils._device): ImportError.
- `_global_forward_hooks`, `_global_forward_pre_hooks`, `_global_backward_hooks`, `_global_backward_pre_hooks`
  (torch.nn.modules.module): AttributeError.
- `_active_collector`, and the name `output_capturing_hook` (output_capturing of transformers): a model that was once
  is asked for hidden states or attentions no longer uses fast paths.
- `_checkpoint_offset` (torch.UntypedStorage): `pytorch_model.bin` is read whole instead of tensor by tensor.
- `_local_tensor`, `_spec` (of a pickled DTensor of torch): the file of a rank of FSDP2 is said to be none.
- `_non_persistent_buffers_set` (of a pickled torch.nn.Module): such a buffer is taken for a tensor of the model.
- `_is_replica` (set on DataParallel's copies): every copy packs the weights again.
"""

from .explain import explain, warm_up
from .prepare import plug_in, prepare_for_inference, prepare_for_training

__all__ = ["explain", "plug_in", "prepare_for_inference", "prepare_for_training", "warm_up"]
