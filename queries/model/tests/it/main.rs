//! The crate's one integration-test binary: the model against published figures and against
//! independent models of the same thing.

mod naive;
mod pages;
mod properties;
mod shared;
