"""Operators of torch that spend no FLOPs as this package counts them: a list that people have read.

Each was looked at: none multiplies matrices, convolves, attends or samples. What torch's tags and schemas show needs no
entry (``free_operators``); some that have one are tagged in newer versions of torch only. A trailing underscore, which
marks an in-place form, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

_AGGREGATES = """
    all allclose amax amin aminmax _aminmax any argmax argmin bincount _coalesce coalesce count_nonzero cummax
    _cummax_helper cummin _cummin_helper cumprod cumsum dist equal hash_tensor histc histogram _histogramdd_bin_edges
    _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _is_all_true _is_any_true kthvalue linalg__powsum
    linalg_cross linalg_vector_norm _logcumsumexp logcumsumexp logsumexp max mean median min mode nanmedian nansum
    native_norm norm prod renorm segment_reduce _segment_reduce_backward _sparse_csr_prod _sparse_csr_sum _sparse_sum
    _sparse_sum_backward std std_mean sum trace var var_mean
"""
_NORMALIZATIONS = """
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional batch_norm_backward
    batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats cudnn_batch_norm
    cudnn_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data
    log_softmax _masked_softmax _masked_softmax_backward miopen_batch_norm miopen_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_batch_norm
    native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    _nested_tensor_softmax_with_shape quantized_batch_norm _safe_softmax _softmax _softmax_backward_data softmax
    _sparse_log_softmax _sparse_log_softmax_backward_data _sparse_softmax _sparse_softmax_backward_data
    _weight_norm_interface _weight_norm_interface_backward
"""
_POOLING_AND_RESIZING = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_avg_pool3d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool1d avg_pool2d
    avg_pool2d_backward avg_pool3d avg_pool3d_backward channel_shuffle col2im constant_pad_nd fractional_max_pool2d
    fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward im2col max_pool2d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    max_unpool2d max_unpool3d mkldnn_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d_backward mkldnn_max_pool2d
    mkldnn_max_pool2d_backward mkldnn_max_pool3d mkldnn_max_pool3d_backward pixel_shuffle pixel_unshuffle
    quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d reflection_pad1d reflection_pad1d_backward
    reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward replication_pad1d
    replication_pad1d_backward replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
    _upsample_nearest_exact3d_backward upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward
"""
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits _ctc_loss _ctc_loss_backward
    _cudnn_ctc_loss huber_loss huber_loss_backward miopen_ctc_loss mse_loss mse_loss_backward multi_margin_loss
    multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward nll_loss2d_backward
    nll_loss2d_forward nll_loss_backward nll_loss_forward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
    soft_margin_loss_backward _use_cudnn_ctc_loss _use_miopen_ctc_loss
"""
_ELEMENTWISE = """
    __irshift__ __ilshift__ _add_relu bucketize _compute_contiguous_strides_offsets copysign elu_backward eq
    floor_divide ge glu glu_backward glu_backward_jvp glu_jvp gt hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward isin le leaky_relu_backward log_sigmoid_backward log_sigmoid_forward lt
    masked_fill mish_backward ne polar complex _prelu_kernel _prelu_kernel_backward rrelu_with_noise
    rrelu_with_noise_backward rrelu_with_noise_functional softplus_backward softshrink_backward threshold
    _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    _transform_bias_rescale_qkv _amp_foreach_non_finite_check_and_unscale _amp_update_scale
"""
_OPTIMIZERS = """
    _foreach_powsum _fused_adagrad _fused_adam _fused_adamw _fused_sgd
"""
_RANDOM = """
    bernoulli binomial cauchy _cudnn_init_dropout_state _dirichlet_grad exponential _fill_mem_eff_dropout_mask
    _fused_dropout geometric log_normal _masked_scale multinomial native_dropout native_dropout_backward normal
    normal_functional _philox_key_fold_in _philox_key_split _philox_normal _philox_uniform poisson rand rand_like
    randint randint_like randn randn_like random randperm _sample_dirichlet _standard_gamma _standard_gamma_grad uniform
"""
_INDEXING = """
    _chunk_cat cat _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward embedding embedding_dense_backward embedding_renorm flip gather index
    index_add index_copy index_fill index_put _index_put_impl index_reduce index_select masked_scatter
    masked_scatter_backward masked_select nonzero nonzero_static put repeat repeat_interleave roll rot90 scatter
    scatter_add scatter_reduce searchsorted sort stack _stack take topk tril triu tril_indices triu_indices _unique
    _unique2 unique_consecutive unique_dim unique_dim_consecutive _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate
"""
_COPIES_AND_FACTORIES = """
    alias_copy arange as_strided as_strided_copy as_strided_scatter bartlett_window blackman_window block_diag
    ccol_indices_copy clone _coalesced col_indices_copy _conj_copy contiguous copy _copy_from _copy_from_and_resize
    copy_sparse_to_sparse crow_indices_copy detach detach_copy diag_embed diagonal_backward diagonal_copy
    diagonal_scatter _efficientzerotensor empty _empty_affine_quantized empty_like _empty_per_channel_affine_quantized
    empty_permuted empty_quantized empty_strided expand_copy eye fft_fftfreq fft_rfftfreq fill from_file full full_like
    _fw_primal_copy hamming_window hann_window indices_copy _indices_copy kaiser_window _lazy_clone lift lift_fresh
    lift_fresh_copy linspace logspace _make_dual_copy _make_per_channel_quantized_tensor
    _make_per_tensor_quantized_tensor _mkldnn_reshape _mkldnn_transpose narrow_copy _neg_view_copy new_empty
    new_empty_strided new_full new_ones new_zeros _new_zeros_with_same_feature_meta ones ones_like permute_copy
    _pin_memory range _reshape_alias_copy _reshape_copy resize resize_as _resize_output row_indices_copy scalar_tensor
    select_backward select_copy select_scatter set slice_backward slice_copy slice_scatter split_copy
    split_with_sizes_copy squeeze squeeze_copy t t_copy _to_copy to_mkldnn transpose transpose_copy unbind_copy
    unfold_backward unfold_copy unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze unsqueeze_copy values_copy
    _values_copy view_as_complex_copy view_as_real_copy view_copy zero zeros zeros_like
"""
_LAYOUTS = """
    _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _convert_weight_to_int4pack
    _convert_weight_to_int4pack_for_cpu _cslt_compress _cudnn_rnn_flatten_weight _dyn_quant_pack_4bit_weight
    _jagged_to_padded_dense_forward lu_unpack mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
    _nested_compute_contiguous_strides_offsets _nested_from_padded _nested_from_padded_and_nested_example
    _nested_from_padded_tensor _nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen
    _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx _nested_get_values_copy _nested_select_backward
    _nested_sum_backward _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned _nested_tensor_from_tensor_list
    _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides _nested_view_from_buffer_copy
    _nested_view_from_jagged_copy nested_to_padded_tensor _pack_padded_sequence _padded_dense_to_jagged_forward
    resize_as_sparse _sparse_broadcast_to_copy _sparse_compressed_tensor_with_dims sparse_compressed_tensor
    sparse_coo_tensor _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors sparse_mask
    _sparse_mask_projection sparse_resize sparse_resize_and_clear _sparse_semi_structured_apply
    _sparse_semi_structured_apply_dense _sparse_semi_structured_tile _spdiags _to_dense to_padded_tensor _to_sparse
    _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _to_sparse_semi_structured
    _validate_compressed_sparse_indices
"""
_QUANTIZING = """
    dequantize fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_tensor_affine_backward fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper
    _fused_moving_avg_obs_fq_helper_functional int_repr quantize_per_channel quantize_per_tensor
    quantize_per_tensor_dynamic
"""
_QUESTIONS = """
    _assert_async _assert_scalar _assert_tensor_metadata dense_dim _dimI _dimV element_size _functional_assert_async
    _functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size _fused_sdp_choice
    _has_same_storage_numel is_coalesced is_contiguous is_non_overlapping_and_dense is_pinned is_same_size is_set_to
    is_strides_like_format item _linalg_check_errors _local_scalar_dense
    _make_dep_token _nnz _print q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point
    qscheme record_stream size sparse_dim storage_offset stride sym_constrain_range
    sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size
    sym_storage_offset sym_stride
"""

_QUANTIZED = """
    add add_out add_relu add_relu_out add_scalar add_scalar_out add_scalar_relu add_scalar_relu_out batch_norm
    batch_norm1d batch_norm1d_relu batch_norm2d batch_norm2d_relu batch_norm3d batch_norm3d_relu batch_norm_relu cat
    cat_out cat_relu cat_relu_out celu clamp dropout elu embedding_4bit
    embedding_bag_2bit_rowwise_offsets embedding_bag_4bit embedding_bag_4bit_rowwise_offsets embedding_bag_byte
    embedding_bag_byte_rowwise_offsets embedding_byte group_norm hardswish instance_norm layer_norm leaky_relu
    max_pool1d max_pool2d mul mul_out mul_relu mul_relu_out mul_scalar mul_scalar_out mul_scalar_relu
    mul_scalar_relu_out prelu relu6 sigmoid softmax threshold
"""
_QUANTIZED_PACKING = """
    conv1d_prepack conv1d_unpack conv2d_prepack conv2d_unpack conv2d_unpack_sizes conv3d_prepack conv3d_unpack
    conv_prepack conv_transpose1d_prepack conv_transpose1d_unpack conv_transpose2d_prepack conv_transpose2d_unpack
    conv_transpose3d_prepack conv_transpose3d_unpack conv_unpack embedding_bag_2bit_prepack
    embedding_bag_2bit_prepack_with_rowwise_min_max embedding_bag_2bit_unpack embedding_bag_4bit_prepack
    embedding_bag_4bit_prepack_with_rowwise_min_max embedding_bag_4bit_unpack embedding_bag_byte_prepack
    embedding_bag_byte_prepack_with_rowwise_min_max embedding_bag_byte_unpack embedding_bag_prepack
    embedding_bag_unpack linear_prepack linear_prepack_fp16 linear_prepack_fp16_legacy linear_prepack_legacy
    linear_unpack linear_unpack_fp16 make_quantized_cell_params make_quantized_cell_params_dynamic
    make_quantized_cell_params_fp16
"""
_PRIMS = """
    _low_memory_max_pool_offsets_to_indices _low_memory_max_pool_with_offsets _make_token _sink_tokens
    _unsafe_index_put abs acos acosh add amax amin as_strided as_strided_scatter asin asinh atan atan2 atanh bessel_i0
    bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and bitwise_not bitwise_or bitwise_xor
    broadcast_in_dim cat cbrt ceil clone collapse collapse_view conj conj_physical convert_element_type copy_strided
    copy_to cos cosh device_put digamma div empty empty_permuted empty_strided eq erf erf_inv erfc erfcx exp exp2 expm1
    fill floor fma fmax fmin fmod frexp full full_like gcd ge gt hypot igamma igammac imag inductor_cvt_e8m0_rceil
    inductor_force_stride_order inductor_lookup_seed inductor_rand_eager_offset inductor_rand_eager_offsets
    inductor_randint inductor_random inductor_seed inductor_seeds iota isfinite item le lgamma log log10 log1p log2 lt
    maximum maximum_value minimum minimum_value mul ndtri ne neg nextafter normal pow prepare_softmax_online prod real
    reciprocal remainder reshape resize rev round rsqrt scalar_tensor shift_left shift_right_arithmetic sign signbit
    sin sinh spherical_bessel_j0 split_dim sqrt squeeze sub sum tan tanh transpose trunc uniform var view_of
    view_of_dtype where xor_sum zeta
"""
_FUNCTIONAL_COLLECTIVES = """
    all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_reduce all_reduce_coalesced
    all_to_all_single batch_p2p_ops broadcast irecv isend reduce_scatter_tensor reduce_scatter_tensor_coalesced
    reduce_scatter_tensor_out wait_tensor _wrap_tensor_autograd
"""
_PROCESS_GROUP = """
    _allgather_base allgather allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall
    alltoall_base barrier broadcast check_for_nan gather monitored_barrier recv recv_any_source reduce
    _reduce_scatter_base reduce_scatter reduce_scatter_tensor_coalesced scatter send
"""
_SYMMETRIC_MEMORY = """
    _barrier _low_contention_all_gather _low_contention_reduce_scatter _rendezvous all_to_all_vdev all_to_all_vdev_2d
    all_to_all_vdev_2d_offset get_remote_tensors memset32 multi_root_tile_reduce multimem_all_gather_out
    multimem_all_reduce multimem_one_shot_all_reduce multimem_one_shot_all_reduce_out multimem_one_shot_reduce_out
    nccl_get nccl_put nccl_put_signal nccl_put_with_signal nccl_reduce_scatter_offset nccl_wait_for_signal
    nccl_wait_signal nvshmem_all_to_all nvshmem_broadcast nvshmem_get nvshmem_put nvshmem_put_with_signal
    nvshmem_wait_for_signal one_shot_all_reduce one_shot_all_reduce_copy one_shot_all_reduce_copy_out
    one_shot_all_reduce_out reduce_scatter_out stream_write_value32 tile_reduce two_shot_all_reduce
    two_shot_all_reduce_out
"""
_STATIC_RUNTIME = """
    clamp_nan_to_num create_owned_ref dequantize_copy dict_unpack embedding_bag expand_dims_copy flatten_copy
    fused_equally_split layer_norm permute_copy reshape_copy select_tensor signed_log1p to_copy to_maybe_copy_out
    VarTupleUnpack
"""

_ELSEWHERE: Mapping[str, str] = {
    "_c10d_functional": _FUNCTIONAL_COLLECTIVES,
    "_c10d_functional_autograd": _FUNCTIONAL_COLLECTIVES,
    "_dtensor": "mesh_get_process_group shard_dim_alltoall",
    "_inductor_test": "realize",
    "_quantized": "add conv2d_prepack conv3d_prepack conv_transpose1d_prepack conv_transpose2d_prepack "
    "conv_transpose3d_prepack linear_prepack linear_prepack_fp16 linear_prepack_fp16_legacy linear_prepack_legacy "
    "_wrapped_linear_prepack wrapped_fbgemm_pack_gemm_matrix_fp16",
    "ao": "offload reload wait_tensor",
    "bucketing": "_pre_bucket_all_gather _pre_bucket_reduce_scatter",
    "c10d": _PROCESS_GROUP,
    "c10d_functional": _FUNCTIONAL_COLLECTIVES,
    "cplib": "flex_cp_allgather flex_cp_allgather_backward",
    "debugprims": "load_tensor",
    "export": "access_subclass_inner_tensor",
    "flex_lib": "zeros_and_scatter",
    "fsdp": "all_gather_copy_in chunk_cat copy split_with_sizes_copy",
    "inductor": "_alloc_from_pool _reinterpret_tensor accumulate_grad resize_storage_bytes",
    "inductor_prims": "inductor_reserve_rng_state",
    "mkl": "_mkl_reorder_linear_weight",
    "mkldnn": "_get_mkldnn_serialized_md _nbytes data_ptr _reorder_convolution_transpose_weight "
    "_reorder_convolution_weight _reorder_linear_weight _reorder_mkldnn_rnn_layer_weight",
    "mkldnn_prepacked": "conv2d_prepack",
    "onednn": "linear_prepack_fp16 qadd qadd_relu qbatch_norm2d qconv_prepack qlinear_prepack qmul",
    "onnx": "RotaryEmbedding",
    "prepacked": "conv2d_clamp_prepack conv2d_transpose_clamp_prepack linear_clamp_prepack "
    "unpack_prepacked_sizes_conv2d unpack_prepacked_sizes_linear",
    # Questions to a tensor, or to a subclass, about itself: they compute nothing.
    "prim": "data device dtype grad is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested "
    "is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name nbytes requires_grad",
    "prims": _PRIMS,
    "profiler": "_record_function_enter _record_function_enter_new _record_function_exit",
    "quantization": "_Bfloat16QuantizedToFloat _FloatToBfloat16Quantized",
    "quantized": _QUANTIZED + _QUANTIZED_PACKING,
    "quantized_decomposed": "choose_qparams choose_qparams_per_token choose_qparams_per_token_asymmetric "
    "choose_qparams_symmetric convert_element_type dequantize_per_channel dequantize_per_channel_group "
    "dequantize_per_tensor dequantize_per_token fake_quant_per_channel quantize_per_channel quantize_per_channel_group "
    "quantize_per_tensor quantize_per_token",
    "rngprims": "philox_rand",
    "sparse": "qlinear_prepack qlinear_unpack",
    "static_runtime": _STATIC_RUNTIME,
    "streams": "fork join record_event record_stream sync_dealloc synchronize_device synchronize_event "
    "synchronize_stream wait_event wait_stream",
    "symm_mem": _SYMMETRIC_MEMORY,
}

FREE_NAMES = frozenset(
    f"aten::{name}"
    for names in (
        _AGGREGATES, _NORMALIZATIONS, _POOLING_AND_RESIZING, _LOSSES, _ELEMENTWISE, _OPTIMIZERS, _RANDOM, _INDEXING,
        _COPIES_AND_FACTORIES, _LAYOUTS, _QUANTIZING, _QUESTIONS,
    )
    for name in names.split()
) | frozenset(f"{namespace}::{name}" for namespace, names in _ELSEWHERE.items() for name in names.split())  # fmt: skip
"""Operators by ``namespace::name``."""
