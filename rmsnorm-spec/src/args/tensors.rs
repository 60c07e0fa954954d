//! The list of an argument struct's tensors, and the code generated from it.

/// The tensors of an argument struct, in the order of validation:
/// `presence kind Tensor = field: In|Out Element;`.
///
/// Presence: a `given` tensor is required. An `optional` one has a builder method. One marked
/// `by_hand` is optional too, with a hand-written builder. Kind: a `matrix` is
/// [`Rows`](super::Rows), a `vector` its view. A `source` is read as the first tensor, or
/// overwritten as the second. `scales` are f32 or bytes. A `sum` is a vector that replaces another
/// vector of the same tensor, under its own name.
///
/// The brackets hold the type parameter of codes, if the struct has one, and the name of its
/// replacement. `with` has the fields that are not tensors, besides `lost` and `dtypes`. The list
/// generates [`Views`](super::Views), the builders, `erase`, `restore`, `of_tensors`, `f32_weight`
/// and `weight_dtype`; with `and residual` also `f32_residual` and `residual_dtype`.
macro_rules! tensors {
    ($args:ident $codes:tt $table:tt with $rest:tt $(and $residual:ident)?) => {
        tensors!(@views $args $codes $table);
        tensors!(@change $args $codes $table $rest);
        tensors!(@weight $args $codes $table $rest);
        $(tensors!(@$residual $args $codes $table $rest);)?
    };

    (@views $args:ident [$($code:ident $to:ident)?]
        { $($how:ident $kind:ident $tensor:ident = $name:ident : $view:ident $element:ident;)* }) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element> Views<'a, B>
            for $args<'a, B, T, $($code,)? W, R>
        {
            fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error> {
                $(tensors!(@span self visitor $kind $tensor $name $view $element);)*
                Ok(())
            }

            fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
                $(tensors!(@visit self visitor $kind $tensor $name $view $element);)*
                Ok(())
            }
        }

        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element>
            $args<'a, B, T, $($code,)? W, R>
        {
            $(tensors!(@$how $kind $args $name $view $element);)*
        }
    };

    (@change $args:ident [$($code:ident $to:ident)?]
        { $($how:ident $kind:ident $tensor:ident = $name:ident : $view:ident $element:ident;)* }
        { $($rest:ident: $of:ty),* }) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element>
            $args<'a, B, T, $($code,)? W, R>
        {
            /// The same call with run-time dtypes. Backends launch this form.
            pub fn erase(self) -> $args<'a, Untyped<B>, f32, $(tensors!(@any $code),)? f32, f32> {
                let Ok(args) = self.change::<Erase<B>, f32, $(tensors!(@any $code),)? f32, f32>();
                args
            }

            fn change<V: Change<'a, From = B>, U: Element, $($to: Code,)? X: Element, S: Element>(
                self,
            ) -> Result<$args<'a, V::To, U, $($to,)? X, S>, V::Error> {
                Ok($args {
                    $($name: tensors!(@changed $how (self.$name) $kind $view $element),)*
                    $($rest: self.$rest,)*
                    lost: self.lost,
                    dtypes: self.dtypes,
                })
            }
        }

        impl<'a, B: NormBackend + ?Sized> $args<'a, Untyped<B>, f32, $(tensors!(@any $code),)? f32, f32> {
            /// The same call with types.
            ///
            /// # Errors
            /// `InvalidArgument` if a view has another type than the one named here.
            pub fn restore<T: Element, $($code: Code,)? W: Element, R: Element>(
                self,
            ) -> Result<$args<'a, B, T, $($code,)? W, R>, Error> {
                self.change::<Restore<B>, T, $($code,)? W, R>()
            }

            /// The call with the tensors that `take` returns for their names, for code that has
            /// tensors in a list.
            ///
            /// # Errors
            /// `Missing` if `take` returns none for a tensor that every such call has.
            pub fn of_tensors(
                dtypes: DTypes,
                $($rest: $of,)*
                mut take: impl FnMut(Tensor, &'static str) -> Option<Source<AnyIn<'a, B>, AnyOut<'a, B>>>,
            ) -> Result<Self, Error> {
                Ok($args {
                    $($name: tensors!(@taken $how (
                        take(Tensor::$tensor, stringify!($name)).and_then(tensors!(@as $kind $view))
                    ) $name),)*
                    $($rest,)*
                    lost: None,
                    dtypes,
                })
            }
        }
    };
    (@taken given ($taken:expr) $name:ident) => {
        $taken.ok_or(Error::Missing { arg: stringify!($name), why: "every such call has it" })?
    };
    (@taken $how:ident ($taken:expr) $name:ident) => { $taken };
    (@as matrix In) => { Source::read };
    (@as matrix Out) => { Source::overwritten };
    (@as vector In) => { |given| given.read().map(|rows| rows.view) };
    (@as $vector:ident Out) => { |given| given.overwritten().map(|rows| rows.view.into()) };
    (@as source $overwritten:ident) => { Some };
    (@changed given ($value:expr) $kind:ident $view:ident $element:ident) => {
        tensors!(@map $kind $view $element)($value)?
    };
    (@changed $how:ident ($value:expr) $kind:ident $view:ident $element:ident) => {
        $value.map(tensors!(@map $kind $view $element)).transpose()?
    };
    (@map matrix In $element:ident) => { any::rows_in::<V, $element, tensors!(@to $element)> };
    (@map matrix Out $element:ident) => { any::rows_out::<V, $element, tensors!(@to $element)> };
    (@map vector In $element:ident) => { V::of_read::<$element, tensors!(@to $element)> };
    (@map vector Out $element:ident) => { V::of_written::<$element, tensors!(@to $element)> };
    (@map sum Out $element:ident) => { V::of_written::<$element, tensors!(@to $element)> };
    (@map source $overwritten:ident $element:ident) => { any::source::<V, $element, tensors!(@to $element)> };
    (@map scales Out $element:ident) => { any::scales::<V> };
    (@to T) => { U };
    (@to C) => { D };
    (@to W) => { X };
    (@to R) => { S };
    (@to f32) => { f32 };
    (@any C) => { i8 };

    (@weight $args:ident [$($code:ident $to:ident)?] $table:tt $rest:tt) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element>
            $args<'a, B, T, $($code,)? W, R>
        {
            /// With f32 parameters, for every dtype of the activations: all tensors of dtype `W`.
            /// Call it before they are passed.
            pub fn f32_weight(self) -> $args<'a, B, T, $($code,)? f32, R> {
                self.weight_dtype()
            }

            /// With parameters of that type, for code that is generic over it: the activations'
            /// dtype or f32. Call it before they are passed.
            pub fn weight_dtype<V: Element>(self) -> $args<'a, B, T, $($code,)? V, R> {
                let dtypes = DTypes { weight: V::DTYPE, ..self.dtypes };
                tensors!(@without W self $args dtypes $table $rest)
            }
        }
    };
    (@residual $args:ident [$($code:ident $to:ident)?] $table:tt $rest:tt) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element>
            $args<'a, B, T, $($code,)? W, R>
        {
            /// With an f32 residual stream, for every dtype of the activations: all tensors of
            /// dtype `R`. Call it before they are passed.
            pub fn f32_residual(self) -> $args<'a, B, T, $($code,)? W, f32> {
                self.residual_dtype()
            }

            /// With a residual stream of that type, for code that is generic over it: the
            /// activations' dtype or f32. Call it before they are passed.
            pub fn residual_dtype<Q: Element>(self) -> $args<'a, B, T, $($code,)? W, Q> {
                let dtypes = DTypes { residual: Q::DTYPE, ..self.dtypes };
                tensors!(@without R self $args dtypes $table $rest)
            }
        }
    };
    (@without $gone:ident $self:ident $args:ident $dtypes:ident
        { $($how:ident $kind:ident $tensor:ident = $name:ident : $view:ident $element:ident;)* }
        { $($rest:ident: $of:ty),* }) => {
        $args {
            lost: $self.lost $(.or(tensors!(@lost $gone $element $self $name)))*,
            $($name: tensors!(@kept $gone $element $self $name),)*
            $($rest: $self.$rest,)*
            dtypes: $dtypes,
        }
    };
    (@lost W W $self:ident $name:ident) => { $self.$name.as_ref().map(|_| stringify!($name)) };
    (@lost R R $self:ident $name:ident) => { $self.$name.as_ref().map(|_| stringify!($name)) };
    (@lost $gone:ident $element:ident $self:ident $name:ident) => { None };
    (@kept W W $self:ident $name:ident) => { None };
    (@kept R R $self:ident $name:ident) => { None };
    (@kept $gone:ident $element:ident $self:ident $name:ident) => { $self.$name };

    (@span $self:ident $visitor:ident matrix $tensor:ident $name:ident In $element:ident) => {
        visit::matrix_in::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident matrix $tensor:ident $name:ident Out $element:ident) => {
        visit::matrix_out::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident vector $tensor:ident $name:ident In $element:ident) => {
        visit::vector_in::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident vector $tensor:ident $name:ident Out $element:ident) => {
        visit::vector_out::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident source $tensor:ident $name:ident $overwritten:ident $element:ident) => {
        visit::source::<B, $element>($visitor, [Tensor::$tensor, Tensor::$overwritten], Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident scales $tensor:ident $name:ident Out $element:ident) => {
        visit::scales_out::<B>($visitor, Tensor::$tensor, $self.$name.as_ref())?
    };
    (@span $self:ident $visitor:ident sum $tensor:ident $name:ident Out $element:ident) => {
        visit::sum_out::<B>($visitor, Tensor::$tensor, stringify!($name), $self.$name.as_ref())?
    };
    (@visit $self:ident $visitor:ident sum $tensor:ident $name:ident Out $element:ident) => {
        tensors!(@visit $self $visitor vector $tensor $name Out $element)
    };
    (@visit $self:ident $visitor:ident scales $tensor:ident $name:ident Out $element:ident) => {
        visit::hand_scales::<B>($visitor, Tensor::$tensor, $self.$name)?
    };
    (@visit $self:ident $visitor:ident source $tensor:ident $name:ident $overwritten:ident $element:ident) => {
        visit::hand_source::<B, $element>($visitor, [Tensor::$tensor, Tensor::$overwritten], Option::from($self.$name))?
    };
    (@visit $self:ident $visitor:ident matrix $tensor:ident $name:ident In $element:ident) => {
        if let Some(view) = Option::<Rows<B::In<'a, $element>>>::from($self.$name) {
            $visitor.read::<$element>(Tensor::$tensor, view)?;
        }
    };
    (@visit $self:ident $visitor:ident matrix $tensor:ident $name:ident Out $element:ident) => {
        if let Some(view) = Option::<Rows<B::Out<'a, $element>>>::from($self.$name) {
            $visitor.write::<$element>(Tensor::$tensor, view)?;
        }
    };
    (@visit $self:ident $visitor:ident vector $tensor:ident $name:ident In $element:ident) => {
        if let Some(view) = Option::<B::In<'a, $element>>::from($self.$name) {
            $visitor.read::<$element>(Tensor::$tensor, Rows::dense(view))?;
        }
    };
    (@visit $self:ident $visitor:ident vector $tensor:ident $name:ident Out $element:ident) => {
        if let Some(view) = Option::<B::Out<'a, $element>>::from($self.$name) {
            $visitor.write::<$element>(Tensor::$tensor, Rows::dense(view))?;
        }
    };

    (@given $kind:ident $args:ident $name:ident $view:ident $element:ident) => {};
    (@by_hand $kind:ident $args:ident $name:ident $view:ident $element:ident) => {};
    (@optional sum $args:ident $name:ident $view:ident $element:ident) => {
        tensors!(@optional vector $args $name $view $element);
    };
    (@optional vector $args:ident $name:ident $view:ident $element:ident) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
        pub fn $name(self, $name: B::$view<'a, $element>) -> Self {
            $args { $name: Some($name), ..self }
        }
    };
    (@optional matrix $args:ident $name:ident $view:ident $element:ident) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), "): a view of \
            dense rows, [`Rows::strided`] or [`Rows::grouped`].")]
        pub fn $name(self, $name: impl Into<Rows<B::$view<'a, $element>>>) -> Self {
            $args { $name: Some($name.into()), ..self }
        }
    };
}
pub(super) use tensors;
